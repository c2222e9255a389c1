/* The programs that the playground starts with. */

const REPORT =
  "The driver was Pavel Orlin. The guard was Tessa Brook. The coach left Kolvar with 12 boxes of tea.";

export const PROMPT = `${REPORT}\n\nWho was the guard?`;

export const PROGRAM = {
  name: "two_questions",
  variables: { report: { type: "string" } },
  nodes: [
    question("guard", "Who was the guard?"),
    question("driver", "Who was the driver?"),
    {
      id: "join",
      op: "generate",
      messages: [{ role: "user", content: [
        { text: "Join the findings:\n- " }, { input: "guard" }, { text: "\n- " }, { input: "driver" },
      ] }],
      output: { variable: "sentence", max_tokens: 40, temperature: 0 },
    },
  ],
  outputs: ["sentence"],
};

export const PROGRAM_INPUTS = { report: REPORT };

export const SOURCE = `report: str

guard = llm_chat([user(f"{report}\\n\\nWho was the guard?")], max_tokens=20, temperature=0)["content"]
driver = llm_chat([user(f"{report}\\n\\nWho was the driver?")], max_tokens=20, temperature=0)["content"]
yield {"guard": guard, "driver": driver}
`;

function question(variable, text) {
  return {
    id: `find_${variable}`,
    op: "generate",
    messages: [{ role: "user", content: [{ input: "report" }, { text: `\n\n${text}` }] }],
    output: { variable, max_tokens: 20, temperature: 0 },
  };
}
