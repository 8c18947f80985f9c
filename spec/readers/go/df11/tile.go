package df11

import "encoding/binary"

// tileShape is what follows from the parameters of 6.4.
type tileShape struct {
	elements, bitCount  uint64
	columns, rows       uint64 // of the matrix
	tileColumns, height uint64 // C and R
	across, down, bands uint64
	unitsPerBand        uint64
}

func shapeOfTile(t *Tensor) tileShape {
	s := tileShape{
		tileColumns:  t.Parameters[0],
		columns:      t.Parameters[1],
		bitCount:     t.Parameters[2],
		bands:        1,
		unitsPerBand: 32,
	}
	s.elements, _ = t.Measure()
	s.rows = s.elements / s.columns
	s.height = 8192 / s.tileColumns
	s.across = ceilDiv(s.columns, s.tileColumns)
	s.down = ceilDiv(s.rows, s.height)
	if s.tileColumns == 256 {
		s.bands, s.unitsPerBand = 4, 8
	}
	return s
}

func (s *tileShape) tiles() uint64 { return s.across * s.down }

// checkTile checks what 6.4 demands of the directory.
func (d *Directory) checkTile(t *Tensor) {
	elements, book := d.checkCoded(t, sectionCodebook, sectionIndex, sectionBitstream, sectionPlane)
	name, width, columns, bits := d.Text(t.Name), t.Parameters[0], t.Parameters[1], t.Parameters[2]
	matrix := width == 256 && columns >= 8 && columns%8 == 0 && elements%columns == 0
	vector := width == 8192 && columns == elements
	Corrupt.when(!matrix && !vector, "tensor %q has tiles of %d columns of %d", name, width, columns)
	wrong := bits%8 != 0 || bits < ceilDiv(elements, 2) || bits >= 1<<48
	Corrupt.when(wrong, "tensor %q has a bit_count of %d", name, bits)
	wrong = book < 26 || book > 26+2*4096 || book%2 != 0
	Corrupt.when(wrong, "the codebook of tensor %q has %d bytes", name, book)
	s := shapeOfTile(t)
	Corrupt.when(s.tiles() >= 1<<32, "tensor %q has %d tiles", name, s.tiles())
	d.checkLengths(t, book, 32*(s.tiles()+1), 16*ceilDiv(bits, 128), elements)
}

const lanes = 32

// tileRecord is a record of 6.4.
type tileRecord struct {
	offset, least uint64
	shift         uint
	excesses      []byte // 24 bytes
}

// length is the length of a lane in bits.
func (r *tileRecord) length(lane int) uint64 {
	return r.least + uint64(bitsAt(r.excesses, 6*uint64(lane), 6))<<r.shift
}

// tileDecoder decodes one tensor, tile by tile.
type tileDecoder struct {
	tileShape
	pairCode
	records, bitstream, plane, out []byte
	strict                         bool
}

func decodeTile(t *Tensor, arrays [][]byte, strict bool) []byte {
	d := &tileDecoder{
		tileShape: shapeOfTile(t), pairCode: readPairCode(arrays[0]),
		records: arrays[1], bitstream: arrays[2], plane: arrays[3], strict: strict,
	}
	d.out = make([]byte, 2*d.elements)
	Corrupt.when(d.record(0).offset != 0, "the first tile does not start at bit 0")
	last := d.record(d.tiles())
	Corrupt.when(last.offset != d.bitCount, "the last record has offset %d", last.offset)
	more := last.least != 0 || last.shift != 0 || !allZero(last.excesses)
	Corrupt.when(more, "the last record has more than an offset")
	for i := uint64(0); i < d.tiles(); i++ {
		d.decodeTile(i)
	}
	if strict {
		checkZeroBits(d.bitstream, d.bitCount, 8*uint64(len(d.bitstream)), "from bit_count on")
	}
	return d.out
}

func (d *tileDecoder) record(i uint64) tileRecord {
	b := d.records[32*i : 32*i+32]
	word := binary.LittleEndian.Uint64(b)
	return tileRecord{word & (1<<48 - 1), word >> 48 & (1<<13 - 1), uint(word >> 61), b[8:]}
}

// decodeTile decodes tile i from its record, and the offset of the next one.
func (d *tileDecoder) decodeTile(i uint64) {
	r, next := d.record(i), d.record(i+1).offset
	d.checkEnd(i, r, next)
	p := d.place(i)
	var used [lanes]uint64
	at := r.offset
	for l := range used {
		bits, length := d.decodeLane(&p, uint64(l), at), r.length(l)
		wrong := bits > length || length-bits >= 1<<r.shift
		Corrupt.when(wrong, "lane %d of tile %d has %d bits, its pairs have %d", l, i, length, bits)
		if d.strict {
			checkZeroBits(d.bitstream, at+bits, at+length, "after the pairs of a lane")
		}
		used[l] = bits
		at += length
	}
	if d.strict {
		checkZeroBits(d.bitstream, at, next, "after the lanes of a tile")
		r.checkChoice(i, &used)
	}
}

// checkEnd checks the offset of a tile, and that its lanes end at the next.
func (d *tileDecoder) checkEnd(i uint64, r tileRecord, next uint64) {
	wrong := r.offset%8 != 0 || r.offset > d.bitCount || next%8 != 0 || next > d.bitCount
	Corrupt.when(wrong, "tile %d starts at bit %d, and the next at %d", i, r.offset, next)
	end := r.offset
	for l := 0; l < lanes; l++ {
		end += r.length(l)
	}
	end = (end + 7) &^ 7
	Corrupt.when(end != next, "tile %d ends at bit %d, and the next starts at %d", i, end, next)
}

// checkChoice checks least and shift, from the bits of the pairs of each lane:
// they are those that a writer must choose.
func (r *tileRecord) checkChoice(i uint64, used *[lanes]uint64) {
	least, most := used[0], used[0]
	for _, n := range used {
		least = minU64(least, n)
		if n > most {
			most = n
		}
	}
	shift := uint(0)
	for ceilDiv(most-least, 1<<shift) > 63 {
		shift++
	}
	Corrupt.when(r.least != least || r.shift != shift,
		"tile %d has least %d and shift %d and not %d and %d", i, r.least, r.shift, least, shift)
}

// tilePlace is a tile as far as it exists: its place in the matrix, and where
// the bytes of its units are in the plane.
type tilePlace struct {
	row, column   uint64 // of the matrix
	height, width uint64 // as far as they exist
	plane         [1024]uint64
}

// unit is a unit of a tile (6.4, Units).
type unit struct{ row, column, weights uint64 }

// unit returns unit j of a lane in a band; it has no weights if it does not
// exist.
func (s *tileShape) unit(p *tilePlace, band, j, lane uint64) unit {
	u := unit{0, 256*j + 8*lane, 0}
	if s.tileColumns == 256 {
		u = unit{8*band + lane/4, 32*j + 8*(lane%4), 0}
	}
	if u.row < p.height && u.column < p.width {
		u.weights = minU64(8, p.width-u.column)
	}
	return u
}

// place finds tile i, and its units in the plane (6.4, Tiles, Plane).
func (s *tileShape) place(i uint64) tilePlace {
	p := tilePlace{row: s.height * (i / s.across), column: s.tileColumns * (i % s.across)}
	p.height = minU64(s.height, s.rows-p.row)
	p.width = minU64(s.tileColumns, s.columns-p.column)
	at := p.row*s.columns + p.column*p.height
	for band := uint64(0); band < s.bands; band++ {
		for k := uint64(0); k < s.unitsPerBand; k += 2 {
			for lane := uint64(0); lane < lanes; lane++ {
				for j := k; j < k+2; j++ {
					p.plane[s.index(band, j, lane)] = at
					at += s.unit(&p, band, j, lane).weights
				}
			}
		}
	}
	return p
}

func (s *tileShape) index(band, j, lane uint64) uint64 {
	return (band*s.unitsPerBand+j)*lanes + lane
}

// decodeLane decodes the units of a lane, whose bits begin at a bit, and
// returns the number of bits of its pairs.
func (d *tileDecoder) decodeLane(p *tilePlace, lane, at uint64) uint64 {
	begin := at
	for band := uint64(0); band < d.bands; band++ {
		for j := uint64(0); j < d.unitsPerBand; j++ {
			u := d.unit(p, band, j, lane)
			at += d.decodeUnit(p, u, p.plane[d.index(band, j, lane)], at)
		}
	}
	return at - begin
}

// decodeUnit decodes a unit, whose bytes in the plane begin at plane.
func (d *tileDecoder) decodeUnit(p *tilePlace, u unit, plane, at uint64) uint64 {
	begin := at
	element := (p.row+u.row)*d.columns + p.column + u.column
	for i := uint64(0); i < u.weights; i += 2 {
		value, bits, escaped := d.pair(d.bitstream, at)
		if d.strict && escaped && d.hasCode[value] {
			Corrupt.fail("the pair at bit %d is escaped and has a code", at)
		}
		at += bits
		putWeight(d.out[2*(element+i):], byte(value), d.plane[plane+i])
		if i+1 < u.weights {
			putWeight(d.out[2*(element+i+1):], byte(value>>8), d.plane[plane+i+1])
		} else if byte(value) != byte(value>>8) {
			Corrupt.fail("the last pair of a unit has two exponents")
		}
	}
	return at - begin
}
