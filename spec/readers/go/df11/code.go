package df11

import (
	"encoding/binary"
	"math/bits"
)

func u16(b []byte, i int) int { return int(binary.LittleEndian.Uint16(b[2*i:])) }

// bitsAt returns the n bits (n ≤ 32) from bit at on, the first of them as the
// least significant. Bits past the end are zero (6.3, Bit order, Decoding).
func bitsAt(b []byte, at uint64, n uint) uint32 {
	i := at / 8
	var word uint64
	switch {
	case i+8 <= uint64(len(b)):
		word = binary.LittleEndian.Uint64(b[i:])
	case i < uint64(len(b)):
		var last [8]byte
		copy(last[:], b[i:])
		word = binary.LittleEndian.Uint64(last[:])
	}
	return uint32(word >> (at % 8) & (1<<n - 1))
}

// checkZeroBits checks that the bits from begin to end are zero.
func checkZeroBits(b []byte, begin, end uint64, what string) {
	for begin < end {
		n := minU64(end-begin, 32)
		Corrupt.when(bitsAt(b, begin, uint(n)) != 0, "a bit %s is not zero", what)
		begin += n
	}
}

// code is a symbol of a prefix code, with its length in bits. Length 0 says
// that there is no code.
type code struct {
	symbol uint32
	length uint8
}

// canonical builds a table of 2^width entries, indexed by the next bits of a
// bitstream, from codes in ascending order of length and symbol (6.3, Code).
func canonical(codes []code, width uint) []code {
	sum := uint64(0)
	for _, c := range codes {
		sum += 1 << (width - uint(c.length))
	}
	single := len(codes) == 1 && codes[0].length == 1
	Corrupt.when(sum != 1<<width && !single, "the code lengths are those of no code")
	table := make([]code, 1<<width)
	next, length := uint32(0), uint8(0)
	for _, c := range codes {
		next <<= c.length - length
		length = c.length
		first := bits.Reverse32(next) >> (32 - uint(length))
		for i := first; i < 1<<width; i += 1 << length {
			table[i] = c
		}
		next++
	}
	return table
}

// readGapCode builds the table of a code from the code lengths of a codebook
// (6.3, Code).
func readGapCode(book []byte) []code {
	var codes []code
	for length := uint8(1); length <= maxCodeLength; length++ {
		for exponent, l := range book[:256] {
			Corrupt.when(l > maxCodeLength, "exponent %d has a code length of %d", exponent, l)
			if l == length {
				codes = append(codes, code{uint32(exponent), length})
			}
		}
	}
	return canonical(codes, maxCodeLength)
}

// checkLUTs compares the stored LUTs with those that follow from the code
// (6.3, LUTs). Entries of the table are indexed by 16 bits, the first one
// being the least significant: the low eight are the index of LUT 0.
func checkLUTs(book []byte, table []code) {
	stored := book[256:]
	entry := func(lut, i int, want int) {
		Corrupt.when(len(stored) < 512*(lut+1), "LUT %d is missing", lut)
		Corrupt.when(u16(stored, 256*lut+i) != want, "entry %d of LUT %d is wrong", i, lut)
	}
	n := 1
	for i := 0; i < 256; i++ {
		if c := table[i]; c.length <= 8 {
			entry(0, i, int(c.length)<<8|int(c.symbol))
			continue
		}
		entry(0, i, n)
		for j := 0; j < 256; j++ {
			long := table[i|j<<8]
			entry(n, j, int(long.length)<<8|int(long.symbol))
		}
		n++
	}
	Corrupt.when(len(stored) != 512*n, "the codebook has %d LUTs and not %d", len(stored)/512, n)
}

const (
	maxPairLength = 12
	escape        = 65536 // the value of the escape
)

// pairCode is the code of 6.4.
type pairCode struct {
	table   []code
	hasCode map[uint32]bool
}

// readPairCode reads a codebook, of 26 bytes at least.
func readPairCode(book []byte) pairCode {
	escapeLength, pairs := u16(book, 0), 0
	for length := 1; length <= maxPairLength; length++ {
		pairs += u16(book, length)
	}
	Corrupt.when(escapeLength > maxPairLength, "the escape has %d bits", escapeLength)
	Corrupt.when(len(book) != 26+2*pairs, "a codebook of %d pairs has %d bytes", pairs, len(book))
	hasCode := map[uint32]bool{}
	var codes []code
	at := 13 // where the values begin
	for length := 1; length <= maxPairLength; length++ {
		for begin, end := at, at+u16(book, length); at < end; at++ {
			value := u16(book, at)
			ascends := at == begin || value > u16(book, at-1)
			Corrupt.when(!ascends, "pairs of %d bits do not ascend", length)
			Corrupt.when(hasCode[uint32(value)], "pair %#x has two codes", value)
			hasCode[uint32(value)] = true
			codes = append(codes, code{uint32(value), uint8(length)})
		}
		if escapeLength == length {
			codes = append(codes, code{escape, uint8(length)})
		}
	}
	return pairCode{canonical(codes, maxPairLength), hasCode}
}

// pair reads the pair at a bit. It returns the value and its bits.
func (c *pairCode) pair(b []byte, at uint64) (value uint32, bits uint64, escaped bool) {
	e := c.table[bitsAt(b, at, maxPairLength)]
	if e.length == 0 {
		Corrupt.fail("no code matches at bit %d", at)
	}
	bits = uint64(e.length)
	if e.symbol == escape {
		return bitsAt(b, at+bits, 16), bits + 16, true
	}
	return e.symbol, bits, false
}
