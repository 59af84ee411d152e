"""Small datasets, written as tensorflow_datasets prepares them."""

import io
import json

import numpy as np
import pytest

ROWS = {"train": 23, "test": 7}


def prepare(root, folder, shape, classes, labels, has_id, seed=0, file_format="array_record"):
    """Write a small dataset as tensorflow_datasets prepares it; gives the images and labels of each
    split."""
    features = pytest.importorskip("tensorflow_datasets").features
    from array_record.python.array_record_module import ArrayRecordWriter
    from PIL import Image
    from tensorflow_datasets.proto import tf_example_pb2

    folder_, name, version = root / folder, folder.split("/")[0], folder.split("/")[-1]
    folder_.mkdir(parents=True)
    rng, truth, splits = np.random.default_rng(seed), {}, []
    for split, rows in ROWS.items():
        images = rng.integers(0, 256, (rows, *shape), np.uint8)
        marks = np.concatenate([[labels[1] - 1, labels[0]], rng.integers(*labels, rows - 2)])
        writer = ArrayRecordWriter(
            str(folder_ / f"{name}-{split}.array_record-00000-of-00001"), "group_size:1"
        )
        size = 0
        for i, (image, mark) in enumerate(zip(images, marks, strict=True)):
            png, example = io.BytesIO(), tf_example_pb2.Example()
            Image.fromarray(image.squeeze()).save(png, format="PNG")
            example.features.feature["image"].bytes_list.value.append(png.getvalue())
            example.features.feature["label"].int64_list.value.append(int(mark))
            if has_id:
                example.features.feature["id"].bytes_list.value.append(f"{split}_{i:05d}".encode())
            writer.write(example.SerializeToString())
            size += example.ByteSize()
        writer.close()
        truth[split] = images, marks
        splits.append(
            {
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                "name": split,
                "numBytes": str(size),
                "shardLengths": [str(rows)],
            }
        )
    parts = {
        "image": features.Image(shape=shape),
        "label": features.ClassLabel(num_classes=classes),
    }
    record = features.FeaturesDict(parts | ({"id": features.Text()} if has_id else {}))
    record.save_config(str(folder_))
    info = {"fileFormat": file_format, "name": name, "version": version, "splits": splits}
    if folder.count("/") == 2:
        info["configName"] = folder.split("/")[1]
    (folder_ / "dataset_info.json").write_text(json.dumps(info))
    return truth
