package df11

import (
	"bytes"
	"encoding/binary"
)

// gapShape is what follows from the parameters of 6.3.
type gapShape struct {
	elements, bitCount, threadBytes, threadsPerBlock uint64
	threads                                          uint64
	lengths                                          []uint64 // of the arrays
}

// shapeOfGap checks parameters and the length of the codebook, after that of the
// plane was checked.
func shapeOfGap(t *Tensor, codebook uint64) (s gapShape) {
	s.elements, _ = t.Measure()
	s.threadBytes, s.threadsPerBlock, s.bitCount = t.Parameters[0], t.Parameters[1], t.Parameters[2]
	bytes, threads := s.threadBytes, s.threadsPerBlock
	known := bytes == 8 || bytes == 16 || bytes == 32 || bytes == 64
	Corrupt.when(!known, "a tensor has %d bytes_per_thread", bytes)
	known = threads == 64 || threads == 128 || threads == 256 || threads == 512 || threads == 1024
	Corrupt.when(!known, "a tensor has %d threads_per_block", threads)
	wrong := s.bitCount < s.elements || ceilDiv(s.bitCount, maxCodeLength) > s.elements
	Corrupt.when(wrong, "a tensor has a bit_count of %d", s.bitCount)
	s.threads = ceilDiv(s.bitCount, 8*bytes)
	wrong = codebook < 256+512 || codebook > 256+512*128 || codebook%512 != 256
	Corrupt.when(wrong, "a codebook has %d bytes", codebook)
	offsets := 8 * (ceilDiv(s.threads, threads) + 1)
	s.lengths = []uint64{codebook, ceilDiv(s.threads, 2), offsets, bytes * s.threads, s.elements}
	return s
}

// decodeGap decodes a tensor from its first bit to its last. It makes gaps and
// output offsets of the boundaries that it meets, to compare them.
func decodeGap(t *Tensor, arrays [][]byte) []byte {
	s, bitstream := shapeOfGap(t, uint64(len(arrays[0]))), arrays[3]
	table := readGapCode(arrays[0])
	out, gaps, offsets := make([]byte, 2*s.elements), make([]byte, len(arrays[1])), []byte(nil)
	at, thread := uint64(0), uint64(0)
	boundary := func(element uint64) {
		for ; thread < s.threads && 8*s.threadBytes*thread <= at; thread++ {
			gaps[thread/2] |= byte(at-8*s.threadBytes*thread) << (4 * (thread % 2))
			if thread%s.threadsPerBlock == 0 {
				offsets = binary.LittleEndian.AppendUint64(offsets, element)
			}
		}
	}
	for e := uint64(0); e < s.elements; e++ {
		boundary(e)
		exponent, length := next(table, bitstream, at, maxCodeLength)
		at += length
		putWeight(out[2*e:], byte(exponent), arrays[4][e])
	}
	boundary(s.elements)
	offsets = binary.LittleEndian.AppendUint64(offsets, s.elements)
	Corrupt.when(at != s.bitCount, "the codes end at bit %d and not at bit_count", at)
	Corrupt.when(!bytes.Equal(gaps, arrays[1]), "a gap is wrong")
	Corrupt.when(!bytes.Equal(offsets, arrays[2]), "an output offset is wrong")
	Corrupt.when(!bytes.Equal(luts(table), arrays[0][256:]), "a LUT is wrong, or their number")
	checkZeroBits(bitstream, s.bitCount, 8*uint64(len(bitstream)), "from bit_count on")
	return out
}
