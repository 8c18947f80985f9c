package df11

import "encoding/binary"

const (
	maxPairLength = 12
	escape        = 65536 // the value of the escape
)

// tileCode is the code of 6.4.
type tileCode struct {
	table []code
	coded [escape / 8]byte // a bit for each pair that has a code
}

func (c *tileCode) hasCode(value uint32) bool {
	return c.coded[value/8]>>(value%8)&1 != 0
}

// readTileCode reads a codebook, of 26 bytes at least.
func readTileCode(book []byte) (*tileCode, error) {
	u16 := func(i int) int { return int(binary.LittleEndian.Uint16(book[2*i:])) }
	escapeLength, n := u16(0), 0
	for length := 1; length <= maxPairLength; length++ {
		n += u16(length)
	}
	if escapeLength > maxPairLength {
		return nil, corrupt("the escape has %d bits", escapeLength)
	}
	if len(book) != 26+2*n {
		return nil, corrupt("a codebook of %d pairs has %d bytes", n, len(book))
	}
	c := &tileCode{}
	var codes []code
	at := 13 // where the values begin
	for length := 1; length <= maxPairLength; length++ {
		count := u16(length)
		for i := 0; i < count; i++ {
			value := u16(at + i)
			if i > 0 && value <= u16(at+i-1) {
				return nil, corrupt("pairs of %d bits do not ascend", length)
			}
			if c.hasCode(uint32(value)) {
				return nil, corrupt("pair %#x has two codes", value)
			}
			c.coded[value/8] |= 1 << (value % 8)
			codes = append(codes, code{uint32(value), uint8(length)})
		}
		at += count
		if escapeLength == length {
			codes = append(codes, code{escape, uint8(length)})
		}
	}
	if c.table = canonical(codes, maxPairLength); c.table == nil {
		return nil, corrupt("the lengths of a codebook are those of no code")
	}
	return c, nil
}

// pair reads the pair at a bit. It returns the value and its bits; 0 bits say
// that no code matches.
func (c *tileCode) pair(b []byte, at uint64) (value uint32, bits uint64, escaped bool) {
	e := c.table[bitsAt(b, at, maxPairLength)]
	if e.symbol != escape {
		return e.symbol, uint64(e.length), false
	}
	at += uint64(e.length)
	return bitsAt(b, at, 16), uint64(e.length) + 16, true
}
