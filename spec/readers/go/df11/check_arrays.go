package df11

// checkArrays checks section 3, Array: to whom arrays belong, and where they
// lie.
func (d *Directory) checkArrays() error {
	return first(d.checkOwners, d.checkPacking, d.checkFileArrays, d.checkTensorBlocks)
}

// checkOwners checks that each array has one owner, in order.
func (d *Directory) checkOwners() error {
	next := uint64(0)
	for i := range d.Files {
		f := &d.Files[i]
		if err := d.own(&next, f.firstArray, f.arrayCount); err != nil {
			return err
		}
	}
	for i := range d.Tensors {
		t := &d.Tensors[i]
		if err := d.own(&next, t.firstArray, t.arrayCount); err != nil {
			return err
		}
	}
	if next != uint64(len(d.Arrays)) {
		return corrupt("%d arrays belong to nobody", uint64(len(d.Arrays))-next)
	}
	return nil
}

// own keeps next at most the count of arrays.
func (d *Directory) own(next *uint64, firstArray, count uint64) error {
	if firstArray != *next {
		return corrupt("first_array is %d and not %d", firstArray, *next)
	}
	if count > uint64(len(d.Arrays))-*next {
		return corrupt("a record has %d arrays, more than there are", count)
	}
	*next += count
	return nil
}

// checkPacking checks that arrays fill their sections.
func (d *Directory) checkPacking() error {
	ends := make([]uint64, len(d.Sections)) // of the last array so far
	for i, a := range d.Arrays {
		if a.Section >= uint64(len(d.Sections)) {
			return corrupt("array %d is in section %d", i, a.Section)
		}
		if a.Length == 0 {
			return corrupt("array %d has no bytes", i)
		}
		want, _ := align(ends[a.Section], arrayAlignment)
		if a.Offset != want {
			return corrupt("array %d starts at %d and not at %d", i, a.Offset, want)
		}
		end, ok := add(a.Offset, a.Length)
		if !ok {
			return overflow("the end of an array")
		}
		if end > d.Sections[a.Section].Length {
			return corrupt("array %d ends beyond its section", i)
		}
		ends[a.Section] = end
	}
	for i, s := range d.Sections {
		if knownSection(s.Kind) && s.Length != ends[i] {
			return corrupt("section %d has %d bytes, its arrays end at %d", i, s.Length, ends[i])
		}
	}
	return nil
}

// checkFileArrays needs that arrays have owners.
func (d *Directory) checkFileArrays() error {
	for i := range d.Files {
		f := &d.Files[i]
		if f.arrayCount == 0 {
			continue
		}
		a := d.Arrays[f.firstArray]
		kind, fits := uint32(sectionSide), a.Length == f.Length
		if f.Kind == FileWeights {
			kind, fits = sectionPrefix, a.Length <= f.Length
		}
		if d.Sections[a.Section].Kind != kind {
			return corrupt("the array of file %q is in a wrong section", f.Path)
		}
		if !fits {
			return corrupt("the array of file %q has %d bytes", f.Path, a.Length)
		}
	}
	return nil
}

func (d *Directory) checkTensorBlocks() error {
	for i := range d.Tensors {
		t := &d.Tensors[i]
		for _, a := range d.arraysOf(t) {
			if d.Sections[a.Section].Block != t.Block {
				return corrupt("an array of tensor %q is in another block", t.Name)
			}
		}
	}
	return nil
}

// arraysOf returns the arrays of a tensor, of which the owners were checked.
func (d *Directory) arraysOf(t *Tensor) []Array {
	return d.Arrays[t.firstArray : t.firstArray+t.arrayCount]
}
