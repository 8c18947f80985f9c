package df11

// checkTensors checks section 3, Tensor, and section 5.
func (d *Directory) checkTensors() error {
	for i := range d.Tensors {
		t := &d.Tensors[i]
		if i > 0 && t.Name <= d.Tensors[i-1].Name {
			return corrupt("tensor %q is out of order", t.Name)
		}
		if err := d.checkTensor(t); err != nil {
			return err
		}
	}
	return nil
}

func (d *Directory) checkTensor(t *Tensor) error {
	if t.Block >= uint64(len(d.Blocks)) {
		return corrupt("tensor %q is of block %d", t.Name, t.Block)
	}
	if t.File >= uint64(len(d.Files)) || d.Files[t.File].Kind != FileWeights {
		return corrupt("tensor %q is of file %d, which is no weights file", t.Name, t.File)
	}
	if err := t.checkShape(); err != nil {
		return err
	}
	end, ok := add(t.FileOffset, t.Size)
	if !ok {
		return overflow("the end of a tensor")
	}
	if end > d.Files[t.File].Length {
		return corrupt("tensor %q ends beyond its file", t.Name)
	}
	return nil
}

func (t *Tensor) checkShape() error {
	if t.DimensionCount > maxDimensions {
		return limit("tensor %q has %d dimensions", t.Name, t.DimensionCount)
	}
	for _, n := range t.Shape[t.DimensionCount:] {
		if n != 0 {
			return corrupt("tensor %q has a shape beyond dimension_count", t.Name)
		}
	}
	if knownDtype(t.Dtype) {
		return t.measure()
	}
	return nil
}

// checkParameters checks that parameters which an encoding does not name are
// zero; of an unknown dtype this is known of an alias alone (§3, Tensor).
func (t *Tensor) checkParameters() error {
	named := [...]int{encodingAlias: 1, encodingRaw: 0, encodingGap: 3, encodingTile: 3}
	if t.Encoding > encodingTile || (t.Encoding != encodingAlias && !knownDtype(t.Dtype)) {
		return nil
	}
	for _, p := range t.Parameters[named[t.Encoding]:] {
		if p != 0 {
			return corrupt("tensor %q has a parameter that its encoding does not name", t.Name)
		}
	}
	return nil
}
