package df11

import (
	"encoding/binary"
	"math/bits"
)

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

// zeroBits tells whether the bits from begin to end are zero.
func zeroBits(b []byte, begin, end uint64) bool {
	for begin < end {
		n := minU64(end-begin, 32)
		if bitsAt(b, begin, uint(n)) != 0 {
			return false
		}
		begin += n
	}
	return true
}

// code is a symbol of a prefix code, with its length in bits. Length 0 says
// that there is no code.
type code struct {
	symbol uint32
	length uint8
}

// canonical builds a table of 2^width entries, indexed by the next bits of a
// bitstream, from codes in ascending order of length and symbol (6.3, Code).
// It returns nil if the lengths break the rule on their sum.
func canonical(codes []code, width uint) []code {
	sum := uint64(0)
	for _, c := range codes {
		sum += 1 << (width - uint(c.length))
	}
	single := len(codes) == 1 && codes[0].length == 1
	if sum != 1<<width && !single {
		return nil
	}
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
