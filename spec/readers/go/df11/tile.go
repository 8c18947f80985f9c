package df11

import "encoding/binary"

const lanes = 32

// tileShape is what follows from the parameters of 6.4.
type tileShape struct {
	elements, bitCount  uint64
	columns, rows       uint64 // of the matrix
	tileColumns, height uint64 // C and R
	across, tiles       uint64
	lengths             []uint64 // of the arrays
}

// shapeOfTile checks parameters and the length of the codebook, after that of
// the plane was checked.
func shapeOfTile(t *Tensor, codebook uint64) (s tileShape) {
	s.elements, _ = t.Measure()
	s.tileColumns, s.columns, s.bitCount = t.Parameters[0], t.Parameters[1], t.Parameters[2]
	width, columns, bits := s.tileColumns, s.columns, s.bitCount
	matrix := width == 256 && columns >= 8 && columns%8 == 0 && s.elements%columns == 0
	vector := width == 8192 && columns == s.elements
	Corrupt.when(!matrix && !vector, "a tensor has tiles of %d columns of %d", width, columns)
	wrong := bits%8 != 0 || bits < ceilDiv(s.elements, 2) || bits >= 1<<48
	Corrupt.when(wrong, "a tensor has a bit_count of %d", bits)
	s.rows, s.height, s.across = s.elements/columns, 8192/width, ceilDiv(columns, width)
	s.tiles = s.across * ceilDiv(s.rows, s.height)
	Corrupt.when(s.tiles >= 1<<32, "a tensor has %d tiles", s.tiles)
	wrong = codebook < 26 || codebook > 26+2*4096 || codebook%2 != 0
	Corrupt.when(wrong, "a codebook has %d bytes", codebook)
	plane := t.split().planeBytes(s.elements)
	s.lengths = []uint64{codebook, 32 * (s.tiles + 1), 16 * ceilDiv(bits, 128), plane}
	return s
}

// unit is a unit: its first element, and how many weights come before it in the
// order of the plane (6.4, Units).
type unit struct{ element, plane, weights uint64 }

// units returns the units of tile i that exist, by lane (6.4, Tiles, Plane).
func (s *tileShape) units(i uint64) (out [lanes][]unit) {
	firstRow, firstColumn := s.height*(i/s.across), s.tileColumns*(i%s.across)
	height := min(s.height, s.rows-firstRow)
	width := min(s.tileColumns, s.columns-firstColumn)
	plane := firstRow*s.columns + firstColumn*height
	for n := uint64(0); n < 1024; n++ { // in the order of the plane
		lane, twos := n/2%lanes, n/64
		row, column := uint64(0), 256*(2*twos+n%2)+8*lane
		if s.tileColumns == 256 {
			row, column = 8*(twos/4)+lane/4, 32*(twos%4*2+n%2)+8*(lane%4)
		}
		if row < height && column < width {
			element := (firstRow+row)*s.columns + firstColumn + column
			u := unit{element, plane, min(8, width-column)}
			out[lane] = append(out[lane], u)
			plane += u.weights
		}
	}
	return out
}

// tileRecord is a record of 6.4, with the lengths of the lanes in bits.
type tileRecord struct {
	offset, least, shift uint64
	lengths              [lanes]uint64
	end                  uint64 // of the tile
}

func readRecord(b []byte) (r tileRecord) {
	word := binary.LittleEndian.Uint64(b)
	r.offset, r.least, r.shift = word&(1<<48-1), word>>48&(1<<13-1), word>>61
	r.end = r.offset
	for l := range r.lengths {
		r.lengths[l] = r.least + uint64(bitsAt(b[8:], 6*uint64(l), 6))<<r.shift
		r.end += r.lengths[l]
	}
	r.end = align(r.end, 8)
	return r
}

// tileDecoder decodes one tensor, tile by tile.
type tileDecoder struct {
	pairCode
	split                 split
	bitstream, plane, out []byte
}

func decodeTile(t *Tensor, arrays [][]byte) []byte {
	s, records := shapeOfTile(t, uint64(len(arrays[0]))), arrays[1]
	f := t.split()
	out := make([]byte, f.bits/8*s.elements)
	d := &tileDecoder{readPairCode(arrays[0]), f, arrays[2], arrays[3], out}
	start := uint64(0)
	for i := uint64(0); i < s.tiles; i++ {
		r := readRecord(records[32*i:])
		wrong := r.offset != start || r.end > s.bitCount
		Corrupt.when(wrong, "tile %d is at bits %d to %d, and not at %d", i, r.offset, r.end, start)
		start = r.end
		d.decode(&r, s.units(i))
	}
	last := records[32*s.tiles:]
	wrong := start != s.bitCount || binary.LittleEndian.Uint64(last) != start || !allZero(last[8:])
	Corrupt.when(wrong, "the last record is not bit_count and zeros")
	checkZeroBits(d.bitstream, s.bitCount, 8*uint64(len(d.bitstream)), "from bit_count on")
	return d.out
}

// decode decodes a tile, and checks its lanes.
func (d *tileDecoder) decode(r *tileRecord, units [lanes][]unit) {
	at, least, most := r.offset, uint64(1<<63), uint64(0)
	for l, length := range r.lengths {
		end := at + length
		bits := d.decodeLane(units[l], at)
		wrong := bits > length || length-bits >= 1<<r.shift
		Corrupt.when(wrong, "lane %d has %d bits, its pairs have %d", l, length, bits)
		checkZeroBits(d.bitstream, at+bits, end, "after the pairs of a lane")
		at, least = end, min(least, bits)
		if bits > most {
			most = bits
		}
	}
	checkZeroBits(d.bitstream, at, r.end, "after the lanes of a tile")
	shift := uint64(0) // that a writer must choose
	for ceilDiv(most-least, 1<<shift) > 63 {
		shift++
	}
	wrong := r.least != least || r.shift != shift
	Corrupt.when(wrong, "least and shift are %d, %d and not %d, %d", r.least, r.shift, least, shift)
}

// decodeLane decodes the units of a lane, whose bits begin at a bit, and
// returns the number of bits of its pairs.
func (d *tileDecoder) decodeLane(units []unit, at uint64) uint64 {
	begin := at
	for _, u := range units {
		for i := uint64(0); i < u.weights; i += 2 {
			value, bits := d.pair(d.bitstream, at)
			at += bits
			d.put(u, i, byte(value))
			if i+1 < u.weights {
				d.put(u, i+1, byte(value>>8))
				continue
			}
			Corrupt.when(byte(value) != byte(value>>8), "the last pair of a unit has two exponents")
		}
	}
	return at - begin
}

// put writes weight i of a unit, and checks the bits after the last one (6.5).
func (d *tileDecoder) put(u unit, i uint64, exponent byte) {
	f := d.split
	Corrupt.when(uint64(exponent)>>f.exponent != 0, "a weight has the exponent %d", exponent)
	at := 8*f.planeBytes(u.plane) + f.kept*i
	d.split.put(d.out[f.bits/8*(u.element+i):], exponent, bitsAt(d.plane, at, uint(f.kept)))
	if end := at + f.kept; i+1 == u.weights {
		checkZeroBits(d.plane, end, align(end, 8), "after the last weight of a unit")
	}
}

// split is how a float is split (6.5): its bits, and those of its exponent and
// of what is kept.
type split struct{ bits, exponent, kept uint64 }

func (t *Tensor) split() split {
	bits, exponent := dtypes[t.Dtype].bits, exponentBits[t.Dtype]
	return split{bits, exponent, bits - exponent - t.Parameters[3]}
}

func (f split) planeBytes(weights uint64) uint64 { return ceilDiv(weights*f.kept, 8) }

func (f split) put(out []byte, exponent byte, kept uint32) {
	low := f.kept - 1
	weight := uint32(exponent)<<low | kept&(1<<low-1)
	weight = weight<<(f.bits-f.exponent-f.kept) | kept>>low<<(f.bits-1)
	for i := uint64(0); i < f.bits/8; i++ {
		out[i] = byte(weight >> (8 * i))
	}
}
