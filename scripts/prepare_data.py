"""Turn a source into token shards before training: `python scripts/prepare_data.py --config small.yaml`.

Training with the same settings finds them. Killed or stopped, it goes on where it was when it is started again; of an entry
that is there already, every byte is checked.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.schema import Experiment, interactive, parse, run_guarded
from data.prepare import prepare


def report(config: Experiment) -> None:
    """Prepare the data and print how fast it went, how much it is and where it lies."""
    data = prepare(config.data, progress=interactive(), check_all=True)
    if work := data.work:
        print(
            f"encoded {work.documents:,} documents, {work.bytes:,} bytes in {work.seconds:,.1f} s: "
            f"{work.documents / work.seconds:,.1f} documents/s, {work.bytes / work.seconds / 1e6:,.2f} MB/s"
        )
    for split in ("train", "val"):
        counts = data.manifest[split]
        print(
            f"{split}: {counts['documents']:,} documents, {counts['bytes']:,} bytes, {counts['tokens']:,} tokens, "
            f"{len(counts['shards'])} shard{'s' if len(counts['shards']) > 1 else ''}"
        )
    print(f"prepared data of vocabulary {data.manifest['vocab_size']:,}, every byte checked: {data.folder}")


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line: exit code 0 done, 2 wrong settings or data, 1 other failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    description = "Tokenize the data of a run before it is trained; only the data settings count."
    config = parse(Experiment, arguments, prog="prepare_data.py", description=description, config_file=True)
    run_guarded("prepare_data.py", lambda: report(config), "--debug" in arguments)


if __name__ == "__main__":
    main()
