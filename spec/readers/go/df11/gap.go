package df11

import "encoding/binary"

// gapShape is what follows from the parameters of 6.3.
type gapShape struct {
	elements, bitCount, threadBits, threadsPerBlock uint64
	threads, threadBlocks                           uint64
}

func shapeOfGap(t *Tensor) gapShape {
	s := gapShape{
		elements:        t.Elements,
		bitCount:        t.Parameters[2],
		threadBits:      8 * t.Parameters[0],
		threadsPerBlock: t.Parameters[1],
	}
	s.threads = ceilDiv(s.bitCount, s.threadBits)
	s.threadBlocks = ceilDiv(s.threads, s.threadsPerBlock)
	return s
}

// checkGap checks what 6.3 demands of the directory.
func (d *Directory) checkGap(t *Tensor) error {
	if t.Dtype != dtypeBF16 || t.Elements == 0 {
		return corrupt("tensor %q is gap and has no BF16 weights", t.Name)
	}
	if err := d.checkKindsOf(t, sectionCodebook, sectionIndex, sectionIndex,
		sectionBitstream, sectionPlane); err != nil {
		return err
	}
	arrays := d.arraysOf(t)
	if arrays[4].Length != t.Elements { // first, so that nothing overflows below
		return corrupt("the plane of tensor %q has %d bytes", t.Name, arrays[4].Length)
	}
	if err := t.checkGapParameters(); err != nil {
		return err
	}
	book := arrays[0].Length
	if book < 256+512 || book > 256+512*128 || book%512 != 256 {
		return corrupt("the codebook of tensor %q has %d bytes", t.Name, book)
	}
	s := shapeOfGap(t)
	return d.checkLengths(t, book, ceilDiv(s.threads, 2), 8*(s.threadBlocks+1),
		t.Parameters[0]*s.threads, t.Elements)
}

func (t *Tensor) checkGapParameters() error {
	switch t.Parameters[0] {
	case 8, 16, 32, 64:
	default:
		return corrupt("tensor %q has %d bytes_per_thread", t.Name, t.Parameters[0])
	}
	switch t.Parameters[1] {
	case 64, 128, 256, 512, 1024:
	default:
		return corrupt("tensor %q has %d threads_per_block", t.Name, t.Parameters[1])
	}
	bits := t.Parameters[2]
	if bits < t.Elements || ceilDiv(bits, maxCodeLength) > t.Elements {
		return corrupt("tensor %q has a bit_count of %d", t.Name, bits)
	}
	return nil
}

// gapDecoder decodes a tensor from its first bit to its last, and compares
// every gap and output offset with the boundaries that it finds on its way.
type gapDecoder struct {
	gapShape
	gaps, offsets, bitstream, plane []byte

	thread uint64 // the next one to be compared
}

func decodeGap(t *Tensor, arrays [][]byte, strict bool) ([]byte, error) {
	table, err := readGapCode(arrays[0])
	if err != nil {
		return nil, err
	}
	g := &gapDecoder{
		gapShape: shapeOfGap(t),
		gaps:     arrays[1], offsets: arrays[2], bitstream: arrays[3], plane: arrays[4],
	}
	out, err := g.run(table)
	if err == nil && strict {
		err = first(func() error { return checkLUTs(arrays[0], table) }, g.checkEnds)
	}
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (g *gapDecoder) run(table []code) ([]byte, error) {
	out := make([]byte, 2*g.elements)
	at := uint64(0)
	for e := uint64(0); e < g.elements; e++ {
		if err := g.boundary(at, e); err != nil {
			return nil, err
		}
		c := table[bitsAt(g.bitstream, at, maxCodeLength)]
		if c.length == 0 {
			return nil, corrupt("no code matches at bit %d", at)
		}
		at += uint64(c.length)
		if at > g.bitCount {
			return nil, corrupt("the code of element %d ends beyond bit_count", e)
		}
		putWeight(out[2*e:], byte(c.symbol), g.plane[e])
	}
	if at != g.bitCount {
		return nil, corrupt("the codes end at bit %d and not at bit_count", at)
	}
	if err := g.boundary(at, g.elements); err != nil {
		return nil, err
	}
	if offset := g.offset(g.threadBlocks); offset != g.elements {
		return nil, corrupt("output offsets end at %d", offset)
	}
	return out, nil
}

// boundary compares the gaps of threads whose first boundary is at, and the
// output offsets of thread blocks that begin with one of them.
func (g *gapDecoder) boundary(at, element uint64) error {
	for g.thread < g.threads && g.thread*g.threadBits <= at {
		i := g.thread
		gap := uint64(g.gaps[i/2] >> (4 * (i % 2)) & 15)
		if gap != at-i*g.threadBits {
			return corrupt("gap(%d) is %d", i, gap)
		}
		if b := i / g.threadsPerBlock; i%g.threadsPerBlock == 0 && g.offset(b) != element {
			return corrupt("output offset %d is %d and not %d", b, g.offset(b), element)
		}
		g.thread++
	}
	return nil
}

func (g *gapDecoder) offset(i uint64) uint64 {
	return binary.LittleEndian.Uint64(g.offsets[8*i:])
}

// checkEnds checks what only verification demands: the unused half of the
// last gap byte, and zeros after bit_count.
func (g *gapDecoder) checkEnds() error {
	if g.threads%2 == 1 && g.gaps[len(g.gaps)-1]>>4 != 0 {
		return corrupt("the half byte after the last gap is not zero")
	}
	if !zeroBits(g.bitstream, g.bitCount, 8*uint64(len(g.bitstream))) {
		return corrupt("a bit from bit_count on is not zero")
	}
	return nil
}
