package df11

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// bitsAt returns the n bits (n ≤ 32) from bit at on, the first of them as the
// least significant. Bits past the end are zero (6.3, Bit order, Decoding).
func bitsAt(b []byte, at uint64, n uint) uint32 {
	var eight [8]byte
	if i := at / 8; i < uint64(len(b)) {
		copy(eight[:], b[i:])
	}
	return uint32(binary.LittleEndian.Uint64(eight[:]) >> (at % 8) & (1<<n - 1))
}

// putWeight joins exponent and sign/mantissa byte (6.3).
func putWeight(out []byte, exponent, signMantissa byte) {
	s := uint16(signMantissa)
	binary.LittleEndian.PutUint16(out, (s&0x80)<<8|uint16(exponent)<<7|s&0x7F)
}

// checkZeroBits checks that the bits from begin to end are zero.
func checkZeroBits(b []byte, begin, end uint64, what string) {
	for ; begin < end; begin += 32 {
		bits := bitsAt(b, begin, uint(min(end-begin, 32)))
		Corrupt.when(bits != 0, "a bit %s is not zero", what)
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

// next reads the symbol at a bit, and the length of its code.
func next(table []code, b []byte, at uint64, width uint) (symbol uint32, length uint64) {
	c := table[bitsAt(b, at, width)]
	if c.length == 0 {
		Corrupt.when(true, "no code matches at bit %d", at)
	}
	return c.symbol, uint64(c.length)
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

// luts returns the LUTs that follow from the code (6.3, LUTs). Entries of the
// table are indexed by 16 bits, the first one being the least significant: the
// low eight are the index of LUT 0.
func luts(table []code) []byte {
	first, further := make([]byte, 0, 512), []byte(nil)
	for i, c := range table[:256] {
		if c.length <= 8 {
			first = append(first, byte(c.symbol), c.length)
			continue
		}
		for j := i; j < 1<<16; j += 256 {
			further = append(further, byte(table[j].symbol), table[j].length)
		}
		first = binary.LittleEndian.AppendUint16(first, uint16(len(further)/512))
	}
	return append(first, further...)
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
	numbers := make([]uint16, len(book)/2)
	check(binary.Read(bytes.NewReader(book), binary.LittleEndian, numbers))
	escapeLength, values, hasCode, codes := numbers[0], numbers[13:], map[uint32]bool{}, []code(nil)
	Corrupt.when(escapeLength > maxPairLength, "the escape has %d bits", escapeLength)
	for i, count := range numbers[1:13] {
		length := uint8(i + 1)
		Corrupt.when(int(count) > len(values), "a codebook has fewer pairs than codes")
		for k, value := range values[:count] {
			wrong := k > 0 && value <= values[k-1] || hasCode[uint32(value)]
			Corrupt.when(wrong, "pair %#x is out of order, or has two codes", value)
			hasCode[uint32(value)] = true
			codes = append(codes, code{uint32(value), length})
		}
		if escapeLength == uint16(length) {
			codes = append(codes, code{escape, length})
		}
		values = values[count:]
	}
	Corrupt.when(len(values) > 0, "a codebook has more pairs than codes")
	return pairCode{canonical(codes, maxPairLength), hasCode}
}

// pair reads the pair at a bit. It returns the value and its bits.
func (c *pairCode) pair(b []byte, at uint64) (value uint32, bits uint64) {
	value, bits = next(c.table, b, at, maxPairLength)
	if value != escape {
		return value, bits
	}
	value = bitsAt(b, at+bits, 16)
	Corrupt.when(c.hasCode[value], "the pair at bit %d is escaped and has a code", at)
	return value, bits + 16
}
