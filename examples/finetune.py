"""Fine-tunes a folder of Qwen2-VL on dialogues of your own, from Python.

    python examples/finetune.py models/qwen2-vl-2b-instruct mine.jsonl

The vision tower is frozen on four devices; the language model has adapters, and four devices of its own.
"""

import argparse

import mmjax as mm


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("folder", help="the folder of the model, as save_pretrained writes it")
    flags.add_argument("dialogues", help="JSON or JSONL of dialogues; images lie beside it")
    flags.add_argument("--run_dir", default="runs/tuned")
    flags.add_argument("--out", default="tuned", help="the folder for the tuned model")
    flags.add_argument("--steps", type=int, default=1000)
    flags.add_argument("--length", type=int, default=2048, help="tokens of a row")
    flags.add_argument("--batch", type=int, default=128)
    flags.add_argument("--microbatches", type=int, default=16)
    flags.add_argument("--platform", default="", help="cpu for virtual devices; the accelerator unless given")
    given = flags.parse_args()

    qwen = mm.from_hf(given.folder)
    recipe = mm.Recipe(
        model=qwen.replace(
            vision=qwen["vision"].frozen().at(mm.Layout(dp=4, rank_offset=4)),
            llm=qwen["llm"].with_lora(rank=16).at(mm.Layout(tp=2, pp=2)),
        ),
        data=mm.messages(given.dialogues, length=given.length, batch=given.batch),
        schedule=mm.one_f_one_b(microbatches=given.microbatches),
        optimizer=mm.adamw(1e-5),
        world=mm.WorldConfig(platform=given.platform),
    )
    run = mm.build(recipe)
    print(run.forecast())
    run.train(steps=given.steps, run_dir=given.run_dir)
    print(run.export(given.out, format="safetensors"))


if __name__ == "__main__":
    main()
