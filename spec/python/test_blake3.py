"""The published test vectors of BLAKE3 for some lengths: the input repeats the bytes 0 to 250."""

import unittest

from blake3 import blake3

VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1023: "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
    2048: "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
    3072: "b98cb0ff3623be03326b373de6b9095218513e64f1ee2edd2525c7ad1e5cffd2",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


class Blake3Test(unittest.TestCase):
    def test_published_vectors(self) -> None:
        for length, expected in VECTORS.items():
            with self.subTest(length=length):
                self.assertEqual(
                    blake3((bytes(range(251)) * (length // 251 + 1))[:length]).hex(), expected
                )


if __name__ == "__main__":
    unittest.main()
