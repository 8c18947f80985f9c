package df11

// checkEncodings checks what section 6 demands of the directory.
func (d *Directory) checkEncodings() error {
	aliases := map[uint64]int{}
	for i := range d.Tensors {
		t := &d.Tensors[i]
		if err := t.checkParameters(); err != nil {
			return err
		}
		if t.Encoding == encodingAlias {
			if err := d.checkAlias(t); err != nil {
				return err
			}
			aliases[t.Parameters[0]]++
			if aliases[t.Parameters[0]] > maxAliases {
				return limit("more than %d aliases of one tensor", maxAliases)
			}
		} else if err := d.checkStored(t); err != nil {
			return err
		}
	}
	return nil
}

// checkAlias checks 6.1, for any dtype and any encoding of the target.
func (d *Directory) checkAlias(t *Tensor) error {
	if t.arrayCount != 0 {
		return corrupt("alias %q has an array", t.Name)
	}
	if t.Parameters[0] >= uint64(len(d.Tensors)) {
		return corrupt("the target of alias %q does not exist", t.Name)
	}
	o := &d.Tensors[t.Parameters[0]]
	if o.Encoding == encodingAlias {
		return corrupt("the target of alias %q is an alias", t.Name)
	}
	if o.Block != t.Block || o.Dtype != t.Dtype || o.DimensionCount != t.DimensionCount ||
		o.Shape != t.Shape || o.Hash != t.Hash {
		return corrupt("alias %q is unlike its target", t.Name)
	}
	return nil
}

// checkStored checks 6.2 to 6.4 where dtype and encoding are known.
func (d *Directory) checkStored(t *Tensor) error {
	if !knownDtype(t.Dtype) {
		return nil
	}
	switch t.Encoding {
	case encodingRaw:
		return d.checkRaw(t)
	case encodingGap:
		return d.checkGap(t)
	case encodingTile:
		return d.checkTile(t)
	}
	return nil
}

// checkRaw checks 6.2.
func (d *Directory) checkRaw(t *Tensor) error {
	if t.Elements == 0 {
		if t.arrayCount != 0 {
			return corrupt("raw tensor %q has no elements and an array", t.Name)
		}
		return nil
	}
	if err := d.checkKindsOf(t, sectionRaw); err != nil {
		return err
	}
	return d.checkLengths(t, t.Size)
}

// checkKindsOf checks number and sections of the arrays of a tensor.
func (d *Directory) checkKindsOf(t *Tensor, kinds ...uint32) error {
	arrays := d.arraysOf(t)
	if len(arrays) != len(kinds) {
		return corrupt("tensor %q has %d arrays", t.Name, len(arrays))
	}
	for i, a := range arrays {
		if d.Sections[a.Section].Kind != kinds[i] {
			return corrupt("array %d of tensor %q is in a wrong section", i, t.Name)
		}
	}
	return nil
}

// checkLengths checks the lengths of the arrays of a tensor, whose number was
// checked.
func (d *Directory) checkLengths(t *Tensor, lengths ...uint64) error {
	for i, a := range d.arraysOf(t) {
		if a.Length != lengths[i] {
			return corrupt("array %d of tensor %q has %d bytes and not %d",
				i, t.Name, a.Length, lengths[i])
		}
	}
	return nil
}
