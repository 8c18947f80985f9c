package df11

import "encoding/binary"

// gapShape is what follows from the parameters of 6.3.
type gapShape struct {
	elements, bitCount, threadBits, threadsPerBlock uint64
	threads, threadBlocks                           uint64
}

func shapeOfGap(t *Tensor) gapShape {
	s := gapShape{
		bitCount:        t.Parameters[2],
		threadBits:      8 * t.Parameters[0],
		threadsPerBlock: t.Parameters[1],
	}
	s.elements, _ = t.Measure()
	s.threads = ceilDiv(s.bitCount, s.threadBits)
	s.threadBlocks = ceilDiv(s.threads, s.threadsPerBlock)
	return s
}

// checkGap checks what 6.3 demands of the directory.
func (d *Directory) checkGap(t *Tensor) {
	elements, book := d.checkCoded(t,
		sectionCodebook, sectionIndex, sectionIndex, sectionBitstream, sectionPlane)
	name, bytes, threads, bits := d.Text(t.Name), t.Parameters[0], t.Parameters[1], t.Parameters[2]
	known := bytes == 8 || bytes == 16 || bytes == 32 || bytes == 64
	Corrupt.when(!known, "tensor %q has %d bytes_per_thread", name, bytes)
	known = threads == 64 || threads == 128 || threads == 256 || threads == 512 || threads == 1024
	Corrupt.when(!known, "tensor %q has %d threads_per_block", name, threads)
	wrong := bits < elements || ceilDiv(bits, maxCodeLength) > elements
	Corrupt.when(wrong, "tensor %q has a bit_count of %d", name, bits)
	wrong = book < 256+512 || book > 256+512*128 || book%512 != 256
	Corrupt.when(wrong, "the codebook of tensor %q has %d bytes", name, book)
	s := shapeOfGap(t)
	d.checkLengths(t, book, ceilDiv(s.threads, 2), 8*(s.threadBlocks+1), bytes*s.threads, elements)
}

// gapDecoder decodes a tensor from its first bit to its last, and compares
// every gap and output offset with the boundaries that it finds on its way.
type gapDecoder struct {
	gapShape
	gaps, offsets, bitstream, plane []byte

	thread uint64 // the next one to be compared
}

func decodeGap(t *Tensor, arrays [][]byte, strict bool) []byte {
	table := readGapCode(arrays[0])
	g := &gapDecoder{
		gapShape: shapeOfGap(t),
		gaps:     arrays[1], offsets: arrays[2], bitstream: arrays[3], plane: arrays[4],
	}
	out := g.run(table)
	if strict {
		checkLUTs(arrays[0], table)
		half := g.threads%2 == 1 && g.gaps[len(g.gaps)-1]>>4 != 0
		Corrupt.when(half, "the half byte after the last gap is not zero")
		checkZeroBits(g.bitstream, g.bitCount, 8*uint64(len(g.bitstream)), "from bit_count on")
	}
	return out
}

func (g *gapDecoder) run(table []code) []byte {
	out := make([]byte, 2*g.elements)
	at := uint64(0)
	for e := uint64(0); e < g.elements; e++ {
		g.boundary(at, e)
		c := table[bitsAt(g.bitstream, at, maxCodeLength)]
		if c.length == 0 {
			Corrupt.fail("no code matches at bit %d", at)
		}
		at += uint64(c.length)
		if at > g.bitCount {
			Corrupt.fail("the code of element %d ends beyond bit_count", e)
		}
		putWeight(out[2*e:], byte(c.symbol), g.plane[e])
	}
	Corrupt.when(at != g.bitCount, "the codes end at bit %d and not at bit_count", at)
	g.boundary(at, g.elements)
	g.checkOffset(g.threadBlocks, g.elements)
	return out
}

// boundary compares the gaps of threads whose first boundary is at, and the
// output offsets of thread blocks that begin with one of them.
func (g *gapDecoder) boundary(at, element uint64) {
	for ; g.thread < g.threads && g.thread*g.threadBits <= at; g.thread++ {
		i := g.thread
		gap := uint64(g.gaps[i/2] >> (4 * (i % 2)) & 15)
		Corrupt.when(gap != at-i*g.threadBits, "gap(%d) is %d", i, gap)
		if i%g.threadsPerBlock == 0 {
			g.checkOffset(i/g.threadsPerBlock, element)
		}
	}
}

func (g *gapDecoder) checkOffset(i, element uint64) {
	offset := binary.LittleEndian.Uint64(g.offsets[8*i:])
	Corrupt.when(offset != element, "output offset %d is %d and not %d", i, offset, element)
}
