package blake3

import "testing"

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
