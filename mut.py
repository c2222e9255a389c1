import subprocess,sys
M=[("memory","if is_last and child.block in self._unmade:","if False:"),
("memory","            if refs[block] > 1:\n                return False","            pass"),
("memory","        if refs[block] > 1 or (node is not None and node.is_kept):","        if refs[block] > 1:"),
("memory","        self._cache.pin(block)\n",""),
("memory","if index and _ancestor(parent.node, parent.depth - index) is not context.node:","if False:"),
("memory","            if parent.step == self._step:","            if False:"),
("engine","        self._memory.undo_step()\n",""),
("memory","if block in self._unmade or parent.ids","if parent.ids"),
("memory","or parent.ids[begin:end] != context.ids[begin:end]:",":"),
("memory","        if context.salt != parent.salt:\n            return\n        self.pool","        self.pool"),
("memory","            self._tree.remove(node)\n        return True","            pass\n        return True"),
("memory","                self._cache.hold(child)\n                self._cache.drop(blocks[index])","                pass"),
("memory","                if not is_computed:\n                    self._unmade.add(child.block)\n",""),
("batcher","        if context.is_released:","        if False:"),
("context","[d for d in self.decoded[:-1] if d[1] > end] +","" ),
("memory","            if lacks and is_coming and parent.is_before(context):","            if lacks and is_coming:"),
("memory","            if lacks and is_coming and parent.is_before(context):","            if False:"),
("memory","if is_movable and victim.has_work and victim.is_before(context):","if False:"),
("radix","and node.last_use == last_use",""),
("engine","context.high_water = min(context.high_water, length)","pass"),
]
for f,a,b in M:
    p=f"engine/{f}.py"; s=open(p).read()
    assert a in s,(f,a)
    open(p,'w').write(s.replace(a,b))
    r=subprocess.run(["/work/main/.venv/bin/python","-m","pytest","-q","-x","tests/engine/test_memory.py","tests/engine/test_engine.py","-p","no:cacheprovider"],env={"PYTHONPATH":".src","PATH":"/usr/bin:/bin"},capture_output=True,text=True,timeout=200)
    print(f, repr(a[:60]), r.stdout.strip().splitlines()[-1])
    open(p,'w').write(s)
