"""The paper's six applications (OSDI'24, section 8), made from lengths alone."""
