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

// schedule holds the order of the message words for each of the seven rounds.
var schedule = makeSchedule()

func makeSchedule() (s [7][16]int) {
	for i := range s[0] {
		s[0][i] = i
	}
	for r := 1; r < len(s); r++ {
		for i := range s[r] {
			s[r][i] = s[r-1][permutation[i]]
		}
	}
	return s
}

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
func compress(cv *[8]uint32, m *[16]uint32, counter uint64, length, flags uint32) [8]uint32 {
	v0, v1, v2, v3 := cv[0], cv[1], cv[2], cv[3]
	v4, v5, v6, v7 := cv[4], cv[5], cv[6], cv[7]
	v8, v9, v10, v11 := iv[0], iv[1], iv[2], iv[3]
	v12, v13, v14, v15 := uint32(counter), uint32(counter>>32), length, flags
	for r := range schedule {
		s := &schedule[r]
		v0, v4, v8, v12 = g(v0, v4, v8, v12, m[s[0]&15], m[s[1]&15])
		v1, v5, v9, v13 = g(v1, v5, v9, v13, m[s[2]&15], m[s[3]&15])
		v2, v6, v10, v14 = g(v2, v6, v10, v14, m[s[4]&15], m[s[5]&15])
		v3, v7, v11, v15 = g(v3, v7, v11, v15, m[s[6]&15], m[s[7]&15])
		v0, v5, v10, v15 = g(v0, v5, v10, v15, m[s[8]&15], m[s[9]&15])
		v1, v6, v11, v12 = g(v1, v6, v11, v12, m[s[10]&15], m[s[11]&15])
		v2, v7, v8, v13 = g(v2, v7, v8, v13, m[s[12]&15], m[s[13]&15])
		v3, v4, v9, v14 = g(v3, v4, v9, v14, m[s[14]&15], m[s[15]&15])
	}
	return [8]uint32{
		v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11,
		v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15,
	}
}

// Hasher computes a hash of what is written to it. The zero value is not
// ready for use; see New.
type Hasher struct {
	cv      [8]uint32 // of the current chunk
	block   [blockLen]byte
	filled  int // bytes in block
	blocks  int // blocks of the chunk that are compressed
	counter uint64
	stack   [][8]uint32 // of finished subtrees, the largest first
}

// New returns a hasher of no bytes.
func New() *Hasher {
	return &Hasher{cv: iv}
}

// Sum256 returns the hash of data.
func Sum256(data []byte) [Size]byte {
	h := New()
	_, _ = h.Write(data)
	return h.Sum()
}

// Write adds bytes; it never fails.
func (h *Hasher) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		if h.filled == blockLen {
			h.flush()
		}
		k := copy(h.block[h.filled:], p)
		h.filled += k
		p = p[k:]
	}
	return n, nil
}

// flush compresses a full block that is not the last one of the input.
func (h *Hasher) flush() {
	last := h.blocks == chunkLen/blockLen-1
	h.cv = h.compressBlock(last, 0)
	h.filled = 0
	h.blocks++
	if last {
		h.push(h.cv)
		h.cv = iv
		h.blocks = 0
	}
}

func (h *Hasher) compressBlock(last bool, flags uint32) [8]uint32 {
	if h.blocks == 0 {
		flags |= flagChunkStart
	}
	if last {
		flags |= flagChunkEnd
	}
	m := words(&h.block)
	return compress(&h.cv, &m, h.counter, uint32(h.filled), flags)
}

// push adds a finished chunk and joins the subtrees that it completes.
func (h *Hasher) push(cv [8]uint32) {
	h.counter++
	for total := h.counter; total&1 == 0; total >>= 1 {
		top := len(h.stack) - 1
		cv = parent(h.stack[top], cv, 0)
		h.stack = h.stack[:top]
	}
	h.stack = append(h.stack, cv)
}

// Sum returns the hash of what was written so far.
func (h *Hasher) Sum() [Size]byte {
	c := *h
	for i := c.filled; i < blockLen; i++ {
		c.block[i] = 0
	}
	if len(c.stack) == 0 {
		return bytesOf(c.compressBlock(true, flagRoot))
	}
	cv := c.compressBlock(true, 0)
	for i := len(c.stack) - 1; i > 0; i-- {
		cv = parent(c.stack[i], cv, 0)
	}
	return bytesOf(parent(c.stack[0], cv, flagRoot))
}

func parent(left, right [8]uint32, flags uint32) [8]uint32 {
	var m [16]uint32
	copy(m[:8], left[:])
	copy(m[8:], right[:])
	return compress(&iv, &m, 0, blockLen, flagParent|flags)
}

func words(b *[blockLen]byte) (m [16]uint32) {
	for i := range m {
		m[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return m
}

func bytesOf(cv [8]uint32) (out [Size]byte) {
	for i, w := range cv {
		binary.LittleEndian.PutUint32(out[4*i:], w)
	}
	return out
}
