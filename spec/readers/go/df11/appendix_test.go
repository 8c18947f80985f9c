package df11

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"
)

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// gapExample is the first example of appendix B.
func gapExample(t *testing.T) (*Tensor, [][]byte) {
	book := make([]byte, 256)
	book[126], book[127], book[128] = 2, 1, 2
	book = append(book, bytes.Repeat(unhex(t, "7f01 7e02 7f01 8002"), 64)...)
	tensor := &Tensor{Dtype: dtypeBF16, Elements: 4, Size: 8, Parameters: [4]uint64{8, 64, 6}}
	return tensor, [][]byte{
		book, {0}, unhex(t, "0000000000000000 0400000000000000"),
		unhex(t, "1600000000000000"), unhex(t, "40000080"),
	}
}

// tileExample is the second one.
func tileExample(t *testing.T) (*Tensor, [][]byte) {
	tensor := &Tensor{Dtype: dtypeBF16, Elements: 8, Size: 16, Parameters: [4]uint64{8192, 8, 8}}
	return tensor, [][]byte{
		unhex(t, `00 00 01 00 02 00 00 00 00 00 00 00 00 00 00 00
			00 00 00 00 00 00 00 00 00 00 7f 7f 7e 7f 7f 80`),
		unhex(t, `00 00 00 00 00 00 00 00 06 00 00 00 00 00 00 00
			00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
			08 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
			00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00`),
		unhex(t, "1c 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"),
		unhex(t, "00 40 80 00 00 00 00 00"),
	}
}

func TestAppendixB(t *testing.T) {
	tensor, arrays := gapExample(t)
	out, err := decodeGap(tensor, arrays, true)
	if err != nil || !bytes.Equal(out, unhex(t, "C03F 0040 803F 00BF")) {
		t.Errorf("gap: %x, %v", out, err)
	}
	tensor, arrays = tileExample(t)
	out, err = decodeTile(tensor, arrays, true)
	if err != nil || !bytes.Equal(out, unhex(t, "803F C03F 80BF 803F 803F 0040 003F 803F")) {
		t.Errorf("tile: %x, %v", out, err)
	}
}

// Each changed bit of gaps, output offsets and records is found by a verifier;
// one of the other arrays does no harm.
func TestAppendixBFlips(t *testing.T) {
	decoders := []func(*Tensor, [][]byte, bool) ([]byte, error){decodeGap, decodeTile}
	for k, example := range []func(*testing.T) (*Tensor, [][]byte){gapExample, tileExample} {
		tensor, arrays := example(t)
		for i, a := range arrays {
			index := i == 1 || (k == 0 && i == 2)
			for bit := 0; bit < 8*len(a); bit += 1 + bit/400*6 {
				a[bit/8] ^= 1 << (bit % 8)
				_, _ = decoders[k](tensor, arrays, false)
				if _, err := decoders[k](tensor, arrays, true); err == nil && index {
					t.Errorf("example %d: bit %d of array %d was not found", k, bit, i)
				}
				a[bit/8] ^= 1 << (bit % 8)
			}
		}
	}
}
