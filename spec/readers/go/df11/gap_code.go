package df11

import "encoding/binary"

// readGapCode builds the table of a code from the code lengths of a codebook
// (6.3, Code).
func readGapCode(book []byte) ([]code, error) {
	var codes []code
	for length := uint8(1); length <= maxCodeLength; length++ {
		for exponent, l := range book[:256] {
			if l > maxCodeLength {
				return nil, corrupt("exponent %d has a code length of %d", exponent, l)
			}
			if l == length {
				codes = append(codes, code{uint32(exponent), length})
			}
		}
	}
	table := canonical(codes, maxCodeLength)
	if table == nil {
		return nil, corrupt("the code lengths are those of no code")
	}
	return table, nil
}

// checkLUTs compares the stored LUTs with those that follow from the code
// (6.3, LUTs). Entries of the table are indexed by 16 bits, the first one
// being the least significant: the low eight are the index of LUT 0.
func checkLUTs(book []byte, table []code) error {
	stored := book[256:]
	n := 1
	for i := 0; i < 256; i++ {
		c := table[i]
		if c.length <= 8 {
			if lutEntry(stored, i) != uint16(c.length)<<8|uint16(c.symbol) {
				return corrupt("entry %d of LUT 0 is wrong", i)
			}
			continue
		}
		if int(lutEntry(stored, i)) != n || len(stored) < 512*(n+1) {
			return corrupt("entry %d of LUT 0 is wrong, or its LUT is missing", i)
		}
		for j := 0; j < 256; j++ {
			long := table[i|j<<8]
			if lutEntry(stored, 256*n+j) != uint16(long.length)<<8|uint16(long.symbol) {
				return corrupt("entry %d of LUT %d is wrong", j, n)
			}
		}
		n++
	}
	if len(stored) != 512*n {
		return corrupt("the codebook has %d LUTs and not %d", len(stored)/512, n)
	}
	return nil
}

func lutEntry(luts []byte, i int) uint16 {
	return binary.LittleEndian.Uint16(luts[2*i:])
}
