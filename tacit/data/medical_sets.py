"""The catalogue's medical sets: ISIC 2018 and MedMNIST's flat, single-label sets."""

from pathlib import Path

from tacit.data import isic
from tacit.data.arrays import Arrays
from tacit.data.download import Progress
from tacit.data.entry import Official, Source
from tacit.data.readers import read_npz

_ISIC = "ISIC2018_Task3_Training_"
_ISIC_HOME = "https://isic-archive.s3.amazonaws.com/challenges/2018/"


def _read_isic(files: dict[str, Path], progress: Progress, size: int) -> Arrays:
    images, truth, groupings = (
        files[f"{_ISIC}{name}"] for name in ("Input.zip", "GroundTruth.zip", "LesionGroupings.csv")
    )
    return isic.read_isic(images, truth, groupings, progress, size)


_ISIC_2018 = Source(
    name="isic2018",
    classes=isic.CLASSES,
    shape=(3, isic.SIZE, isic.SIZE),
    licence="CC BY-NC 4.0",
    megabytes=2642,
    mirror=True,
    images=(8009, 2006),
    total=(327, 514, 1099, 115, 1113, 6705, 142),
    files=(
        Official(f"{_ISIC}Input.zip", (f"{_ISIC_HOME}{_ISIC}Input.zip",), instead=(f"{_ISIC}Input",)),
        Official(
            f"{_ISIC}GroundTruth.zip",
            (f"{_ISIC_HOME}{_ISIC}GroundTruth.zip",),
            instead=(f"{_ISIC}GroundTruth.csv", f"{_ISIC}GroundTruth"),
        ),
        Official(f"{_ISIC}LesionGroupings.csv", (f"{_ISIC_HOME}{_ISIC}LesionGroupings.csv",)),
    ),
    read=lambda files, progress: _read_isic(files, progress, isic.SIZE),
    read_at=lambda files, progress, size: _read_isic(files, progress, size),
    note="HAM10000 (Tschandl, Rosendahl, Kittler 2018); very unequal classes: read macro figures",
)


def _medmnist(
    name: str, classes: str, channels: int, images: tuple[int, int], megabytes: int, md5: str, licence: str
) -> Source:
    address = f"https://zenodo.org/records/10519652/files/{name}.npz?download=1"
    return Source(
        name=f"medmnist/{name}",
        classes=tuple(classes.split(", ")),
        shape=(channels, 28, 28),
        licence=licence,
        megabytes=megabytes,
        mirror=True,
        images=images,
        files=(Official(f"{name}.npz", (address,), md5),),
        read=lambda files, progress: read_npz(files[f"{name}.npz"]),
        note="MedMNIST v2 (Yang and others 2023)",
    )


_ORGANS = (
    "bladder, femur-left, femur-right, heart, kidney-left, kidney-right, liver, lung-left, lung-right, pancreas, spleen"
)
_BY = "CC BY 4.0"
MEDICAL_SETS = (
    _ISIC_2018,
    _medmnist(
        "pathmnist",
        "adipose, background, debris, lymphocytes, mucus, smooth muscle, normal colon mucosa, "
        "cancer-associated stroma, colorectal adenocarcinoma epithelium",
        3,
        (89996, 7180),
        206,
        "a8b06965200029087d5bd730944a56c1",
        _BY,
    ),
    _medmnist(
        "dermamnist",
        "actinic keratoses, basal cell carcinoma, benign keratosis, dermatofibroma, melanoma, nevi, vascular lesions",
        3,
        (7007, 2005),
        20,
        "0744692d530f8e62ec473284d019b0c7",
        "CC BY-NC 4.0",
    ),
    _medmnist(
        "octmnist",
        "choroidal neovascularization, diabetic macular edema, drusen, normal",
        1,
        (97477, 1000),
        55,
        "c68d92d5b585d8d81f7112f81e2d0842",
        _BY,
    ),
    _medmnist("pneumoniamnist", "normal, pneumonia", 1, (4708, 624), 4, "28209eda62fecd6e6a2d98b1501bb15f", _BY),
    _medmnist("retinamnist", "0, 1, 2, 3, 4", 3, (1080, 400), 3, "bd4c0672f1bba3e3a89f0e4e876791e4", _BY),
    _medmnist("breastmnist", "malignant, benign", 1, (546, 156), 1, "750601b1f35ba3300ea97c75c52ff8f6", _BY),
    _medmnist(
        "bloodmnist",
        "basophil, eosinophil, erythroblast, immature granulocyte, lymphocyte, monocyte, neutrophil, platelet",
        3,
        (11959, 3421),
        36,
        "7053d0359d879ad8a5505303e11de1dc",
        _BY,
    ),
    _medmnist(
        "tissuemnist",
        "collecting duct, distal convoluted tubule, glomerular endothelial cells, interstitial endothelial cells, "
        "leukocytes, podocytes, proximal tubule segments, thick ascending limb",
        1,
        (165466, 47280),
        125,
        "ebe78ee8b05294063de985d821c1c34b",
        _BY,
    ),
    _medmnist("organamnist", _ORGANS, 1, (34561, 17778), 38, "68e3f8846a6bd62f0c9bf841c0d9eacc", _BY),
    _medmnist("organcmnist", _ORGANS, 1, (12975, 8216), 15, "b9ceb9546e10131b32923c5bbeaea2b1", _BY),
    _medmnist("organsmnist", _ORGANS, 1, (13932, 8827), 16, "9ab87b696fb54e2a387ebe992d6ed5f1", _BY),
)
