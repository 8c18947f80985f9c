// Package blake3 is BLAKE3 in its default mode with 32 bytes of output,
// written from the public paper: "BLAKE3, one function, fast everywhere".
package blake3

import (
	"encoding/binary"
	"math/bits"
)

// Size is the length of a hash in bytes.
const Size = 32

const (
	blockLen = 64
	chunkLen = 1024

	flagChunkStart = 1
	flagChunkEnd   = 2
	flagParent     = 4
	flagRoot       = 8
)

var iv = [8]uint32{
	0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
	0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
}

var permutation = [16]int{2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8}

func g(a, b, c, d, x, y uint32) (uint32, uint32, uint32, uint32) {
	a += b + x
	d = bits.RotateLeft32(d^a, -16)
	c += d
	b = bits.RotateLeft32(b^c, -12)
	a += b + y
	d = bits.RotateLeft32(d^a, -8)
	c += d
	b = bits.RotateLeft32(b^c, -7)
	return a, b, c, d
}

// compress returns the first eight words of the compression function.
func compress(cv *[8]uint32, m [16]uint32, counter uint64, length, flags uint32) [8]uint32 {
	v0, v1, v2, v3 := cv[0], cv[1], cv[2], cv[3]
	v4, v5, v6, v7 := cv[4], cv[5], cv[6], cv[7]
	v8, v9, v10, v11 := iv[0], iv[1], iv[2], iv[3]
	v12, v13, v14, v15 := uint32(counter), uint32(counter>>32), length, flags
	for round := 0; round < 7; round++ {
		v0, v4, v8, v12 = g(v0, v4, v8, v12, m[0], m[1])
		v1, v5, v9, v13 = g(v1, v5, v9, v13, m[2], m[3])
		v2, v6, v10, v14 = g(v2, v6, v10, v14, m[4], m[5])
		v3, v7, v11, v15 = g(v3, v7, v11, v15, m[6], m[7])
		v0, v5, v10, v15 = g(v0, v5, v10, v15, m[8], m[9])
		v1, v6, v11, v12 = g(v1, v6, v11, v12, m[10], m[11])
		v2, v7, v8, v13 = g(v2, v7, v8, v13, m[12], m[13])
		v3, v4, v9, v14 = g(v3, v4, v9, v14, m[14], m[15])
		before := m
		for i, from := range permutation {
			m[i] = before[from]
		}
	}
	return [8]uint32{
		v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11,
		v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15,
	}
}

// Sum256 returns the hash of data.
func Sum256(data []byte) (out [Size]byte) {
	for i, w := range subtree(data, 0, flagRoot) {
		binary.LittleEndian.PutUint32(out[4*i:], w)
	}
	return out
}

// subtree returns the chaining value of data, which begin with a chunk of this
// number. The left half is the largest power of two of chunks that leaves some
// for the right half.
func subtree(data []byte, number uint64, root uint32) [8]uint32 {
	if len(data) <= chunkLen {
		return chunk(data, number, root)
	}
	half := 1 << (bits.Len(uint(len(data)-1)/chunkLen) - 1)
	left := subtree(data[:half*chunkLen], number, 0)
	right := subtree(data[half*chunkLen:], number+uint64(half), 0)
	var m [16]uint32
	copy(m[:8], left[:])
	copy(m[8:], right[:])
	return compress(&iv, m, 0, blockLen, flagParent|root)
}

func chunk(data []byte, number uint64, root uint32) [8]uint32 {
	cv, flags := iv, uint32(flagChunkStart)
	for {
		var block [blockLen]byte
		n := copy(block[:], data)
		data = data[n:]
		if len(data) == 0 {
			flags |= flagChunkEnd | root
		}
		var m [16]uint32
		for i := range m {
			m[i] = binary.LittleEndian.Uint32(block[4*i:])
		}
		cv = compress(&cv, m, number, uint32(n), flags)
		if len(data) == 0 {
			return cv
		}
		flags = 0
	}
}
