package blake3

import (
	"encoding/hex"
	"testing"
)

// Official test vectors: byte i of the input is i mod 251.
func TestVectors(t *testing.T) {
	for n, want := range map[int]string{
		0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
		1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
	} {
		in := make([]byte, n)
		for i := range in {
			in[i] = byte(i % 251)
		}
		sum := Sum256(in)
		if got := hex.EncodeToString(sum[:]); got != want {
			t.Errorf("%d bytes: got %s, want %s", n, got, want)
		}
	}
}

// Pieces of any size give the hash of the whole, across many chunks.
func TestPieces(t *testing.T) {
	in := make([]byte, 70000)
	for i := range in {
		in[i] = byte(i % 251)
	}
	want := Sum256(in)
	for _, size := range []int{1, 63, 64, 65, 1023, 1024, 1025, 4096} {
		h := New()
		for at := 0; at < len(in); at += size {
			end := at + size
			if end > len(in) {
				end = len(in)
			}
			_, _ = h.Write(in[at:end])
		}
		if h.Sum() != want {
			t.Errorf("pieces of %d bytes differ", size)
		}
	}
}
