package df11

// maxUnits is the number of units of a whole tile.
const maxUnits = 1024

// tilePlace is a tile as far as it exists: its place in the matrix, and where
// the bytes of its units are in the plane.
type tilePlace struct {
	row, column   uint64 // of the matrix
	height, width uint64 // as far as they exist
	plane         [maxUnits]uint64
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
func (d *tileDecoder) decodeLane(p *tilePlace, lane, at uint64) (uint64, error) {
	begin := at
	for band := uint64(0); band < d.bands; band++ {
		for j := uint64(0); j < d.unitsPerBand; j++ {
			u := d.unit(p, band, j, lane)
			bits, err := d.decodeUnit(p, u, p.plane[d.index(band, j, lane)], at)
			if err != nil {
				return 0, err
			}
			at += bits
		}
	}
	return at - begin, nil
}

// decodeUnit decodes a unit, whose bytes in the plane begin at plane.
func (d *tileDecoder) decodeUnit(p *tilePlace, u unit, plane, at uint64) (uint64, error) {
	begin := at
	element := (p.row+u.row)*d.columns + p.column + u.column
	for i := uint64(0); i < u.weights; i += 2 {
		value, bits, escaped := d.pair(d.bitstream, at)
		if bits == 0 {
			return 0, corrupt("no code matches at bit %d", at)
		}
		if d.strict && escaped && d.hasCode(value) {
			return 0, corrupt("the pair at bit %d is escaped and has a code", at)
		}
		at += bits
		putWeight(d.out[2*(element+i):], byte(value), d.plane[plane+i])
		if i+1 < u.weights {
			putWeight(d.out[2*(element+i+1):], byte(value>>8), d.plane[plane+i+1])
		} else if byte(value) != byte(value>>8) {
			return 0, corrupt("the last pair of a unit has two exponents")
		}
	}
	return at - begin, nil
}
