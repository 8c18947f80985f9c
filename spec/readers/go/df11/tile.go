package df11

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
		elements:     t.Elements,
		tileColumns:  t.Parameters[0],
		columns:      t.Parameters[1],
		bitCount:     t.Parameters[2],
		bands:        1,
		unitsPerBand: 32,
	}
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
func (d *Directory) checkTile(t *Tensor) error {
	if t.Dtype != dtypeBF16 || t.Elements == 0 {
		return corrupt("tensor %q is tile and has no BF16 weights", t.Name)
	}
	if err := d.checkKindsOf(t, sectionCodebook, sectionIndex, sectionBitstream,
		sectionPlane); err != nil {
		return err
	}
	arrays := d.arraysOf(t)
	if arrays[3].Length != t.Elements { // first, so that nothing overflows below
		return corrupt("the plane of tensor %q has %d bytes", t.Name, arrays[3].Length)
	}
	if err := t.checkTileParameters(); err != nil {
		return err
	}
	book := arrays[0].Length
	if book < 26 || book > 26+2*4096 || book%2 != 0 {
		return corrupt("the codebook of tensor %q has %d bytes", t.Name, book)
	}
	s := shapeOfTile(t)
	if s.tiles() >= 1<<32 {
		return corrupt("tensor %q has %d tiles", t.Name, s.tiles())
	}
	return d.checkLengths(t, book, 32*(s.tiles()+1), 16*ceilDiv(s.bitCount, 128), t.Elements)
}

func (t *Tensor) checkTileParameters() error {
	width, columns, bits := t.Parameters[0], t.Parameters[1], t.Parameters[2]
	switch {
	case width == 256 && columns >= 8 && columns%8 == 0 && t.Elements%columns == 0:
	case width == 8192 && columns == t.Elements:
	default:
		return corrupt("tensor %q has tiles of %d columns of %d", t.Name, width, columns)
	}
	if bits%8 != 0 || bits < ceilDiv(t.Elements, 2) || bits >= 1<<48 {
		return corrupt("tensor %q has a bit_count of %d", t.Name, bits)
	}
	return nil
}

// tileDecoder decodes one tensor, tile by tile.
type tileDecoder struct {
	tileShape
	*tileCode
	records, bitstream, plane, out []byte
	strict                         bool
}

func decodeTile(t *Tensor, arrays [][]byte, strict bool) ([]byte, error) {
	book, err := readTileCode(arrays[0])
	if err != nil {
		return nil, err
	}
	d := &tileDecoder{
		tileShape: shapeOfTile(t), tileCode: book,
		records: arrays[1], bitstream: arrays[2], plane: arrays[3],
		out: make([]byte, 2*t.Elements), strict: strict,
	}
	if err := d.run(); err != nil {
		return nil, err
	}
	return d.out, nil
}

func (d *tileDecoder) run() error {
	n := d.tiles()
	if at := d.record(0).offset; at != 0 {
		return corrupt("the first tile starts at bit %d", at)
	}
	if err := d.checkLastRecord(n); err != nil {
		return err
	}
	for i := uint64(0); i < n; i++ {
		if err := d.decodeTile(i); err != nil {
			return err
		}
	}
	if d.strict && !zeroBits(d.bitstream, d.bitCount, 8*uint64(len(d.bitstream))) {
		return corrupt("a bit from bit_count on is not zero")
	}
	return nil
}

// decodeTile decodes tile i from its record, and the offset of the next one.
func (d *tileDecoder) decodeTile(i uint64) error {
	r, next := d.record(i), d.record(i+1).offset
	if err := d.checkEnd(i, r, next); err != nil {
		return err
	}
	p := d.place(i)
	var used [lanes]uint64
	at := r.offset
	for l := range used {
		bits, err := d.decodeLane(&p, uint64(l), at)
		if err != nil {
			return err
		}
		length := r.length(l)
		if bits > length || length-bits >= 1<<r.shift {
			return corrupt("lane %d of tile %d has %d bits, its pairs have %d", l, i, length, bits)
		}
		if d.strict && !zeroBits(d.bitstream, at+bits, at+length) {
			return corrupt("a bit after the pairs of lane %d of tile %d is not zero", l, i)
		}
		used[l] = bits
		at += length
	}
	if !d.strict {
		return nil
	}
	if !zeroBits(d.bitstream, at, next) {
		return corrupt("a bit after the lanes of tile %d is not zero", i)
	}
	return r.checkChoice(i, &used)
}
