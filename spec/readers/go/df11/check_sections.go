package df11

func knownSection(kind uint32) bool {
	return kind >= sectionCodebook && kind <= sectionSide
}

func (s *Section) end() uint64 { return s.Offset + s.Length }

// checkSections checks section 3, Section, and the places of section 2.
func (d *Directory) checkSections(directoryOffset uint64) error {
	at := uint64(headBytes) // where the next section starts
	for i := range d.Sections {
		s := &d.Sections[i]
		if i > 0 && !sectionsAscend(&d.Sections[i-1], s) {
			return corrupt("section %d is out of order", i)
		}
		if err := d.checkSection(i, s); err != nil {
			return err
		}
		next, err := checkPlaceOf(i, s, at, directoryOffset)
		if err != nil {
			return err
		}
		at = next
	}
	if at != directoryOffset {
		return corrupt("the directory starts at %d and not at %d", directoryOffset, at)
	}
	return nil
}

func sectionsAscend(a, b *Section) bool {
	return a.Block < b.Block || (a.Block == b.Block && a.Kind < b.Kind)
}

func (d *Directory) checkSection(i int, s *Section) error {
	if s.reserved != 0 {
		return corrupt("reserved of section %d is %d", i, s.reserved)
	}
	if s.Block != none && s.Block >= uint64(len(d.Blocks)) {
		return corrupt("section %d is of block %d", i, s.Block)
	}
	ofNone := s.Kind == sectionPrefix || s.Kind == sectionSide
	if knownSection(s.Kind) && ofNone != (s.Block == none) {
		return corrupt("section %d of kind %d has a block, or lacks one", i, s.Kind)
	}
	return nil
}

// checkPlaceOf returns where the next section starts. It rounds only what
// lies before the directory, so that this cannot overflow.
func checkPlaceOf(i int, s *Section, at, directoryOffset uint64) (uint64, error) {
	if s.Offset != at {
		return 0, corrupt("section %d starts at %d and not at %d", i, s.Offset, at)
	}
	if s.Length == 0 {
		return 0, corrupt("section %d has no bytes", i)
	}
	end, ok := add(s.Offset, s.Length)
	if !ok {
		return 0, overflow("the end of a section")
	}
	if end > directoryOffset {
		return 0, corrupt("section %d ends beyond the directory's start", i)
	}
	next, _ := align(end, sectionAlignment)
	return next, nil
}

// checkChecksumCount checks the count of section 4. All sections lie in the
// file, so the sum does not overflow.
func (d *Directory) checkChecksumCount() error {
	want := uint64(0)
	for i := range d.Sections {
		want += ceilDiv(d.Sections[i].Length, chunkBytes)
	}
	if want != uint64(len(d.Checksums)) {
		return corrupt("%d checksums for %d chunks", len(d.Checksums), want)
	}
	return nil
}
