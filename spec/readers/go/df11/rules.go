package df11

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// check takes the steps 10 and 11 of section 9. Later checks rely on those
// before them.
func (d *Directory) check(directoryOffset uint64) {
	for _, f := range d.Files {
		Unsupported.when(f.Kind > FileBeside, "file kind %d", f.Kind)
	}
	for _, s := range d.Sections {
		Unsupported.when(!s.known() && s.Kind < sectionIgnored, "section kind %d", s.Kind)
	}
	Limit.when(d.ShardCount > maxShards, "shard_count is %d", d.ShardCount)
	Corrupt.when(d.ShardIndex >= d.ShardCount, "shard %d of %d", d.ShardIndex, d.ShardCount)
	d.checkText()
	d.checkMetadata()
	d.checkFiles()
	d.checkBlocks()
	d.checkSections(directoryOffset)
	d.checkTensors()
	d.checkOwners()
	d.checkPacking()
	d.checkFileArrays()
	d.checkEncodings()
}

// checkText checks that paths, names, keys and values lie in the text in their
// order and back to back (3, Text). Limits come first, so that a huge length
// is a Limit.
func (d *Directory) checkText() {
	at, all := uint64(0), uint64(len(d.text))
	next := func(t Text, least, most uint64, what string) {
		Limit.when(t.Length > most, "a %s has %d bytes", what, t.Length)
		wrong := t.Length < least || t.Offset != at || t.Length > all-at
		Corrupt.when(wrong, "a %s has no bytes, or they do not follow the text before", what)
		s := d.Text(t)
		wrong = !utf8.ValidString(s) || strings.IndexByte(s, 0) >= 0
		Corrupt.when(wrong, "a %s is not UTF-8 without NUL", what)
		at += t.Length
	}
	for _, f := range d.Files {
		next(f.Path, 1, maxNameBytes, "path")
	}
	for _, b := range d.Blocks {
		next(b.Name, 1, maxNameBytes, "name of a block")
	}
	for _, t := range d.Tensors {
		next(t.Name, 1, maxNameBytes, "name of a tensor")
	}
	for _, m := range d.Metadata {
		next(m.Key, 1, maxKeyBytes, "key")
		next(m.Value, 0, maxValueBytes, "value")
	}
	Corrupt.when(at != all, "text is left over")
}

// checkMetadata checks section 3, Metadata.
func (d *Directory) checkMetadata() {
	Corrupt.when(len(d.Metadata) > 0 && d.ShardIndex != 0, "metadata in shard %d", d.ShardIndex)
	total, before := uint64(0), ""
	for _, m := range d.Metadata {
		total += m.Key.Length + m.Value.Length
		key := d.Text(m.Key)
		Corrupt.when(key <= before, "key %q of the metadata is out of order", key)
		before = key
	}
	Limit.when(total > maxMetadataBytes, "metadata of %d bytes", total)
}

// checkFiles checks section 3, File, less arrays.
func (d *Directory) checkFiles() {
	Limit.when(len(d.Files) > maxFiles, "%d files", len(d.Files))
	before, paths := "", places{}
	for _, f := range d.Files {
		path := d.Text(f.Path)
		Corrupt.when(f.Reserved != 0, "reserved of file %q is %d", path, f.Reserved)
		checkPath(path)
		taken := f.Kind == FileBeside && strings.HasSuffix(path, ".df11")
		Corrupt.when(taken, "file %q beside the containers ends in .df11", path)
		late := f.Kind != FileWeights && d.ShardIndex != 0
		Corrupt.when(late, "side file %q in shard %d", path, d.ShardIndex)
		order := fmt.Sprint(f.Kind, path) // a kind has one digit
		Corrupt.when(order <= before, "file %q is out of order", path)
		before = order
		paths.add(path)
	}
	folders := len(paths) - len(d.Files)
	Limit.when(folders > maxFolders, "paths name %d folders", folders)
}

// checkPath checks one path (3, File).
func checkPath(path string) {
	for _, r := range path {
		bad := r == '\\' || r == ':' || r < 0x20 || (r >= 0x7F && r <= 0x9F)
		Corrupt.when(bad, "path %q holds %q", path, r)
	}
	components := strings.Split(path, "/")
	for _, c := range components {
		Corrupt.when(c == "" || c == "." || c == "..", "path %q has a component %q", path, c)
		Limit.when(len(c) > maxComponentBytes, "a component of a path has %d bytes", len(c))
	}
	Limit.when(len(components) > maxPathComponents, "a path has %d components", len(components))
}

// places are what one folder is to hold: files (true) and folders (false).
type places map[string]bool

// add refuses a path that is there already, and one that lies in a file.
func (p places) add(path string) {
	_, taken := p[path]
	Corrupt.when(taken, "%q is the path of two files, or of a file and a folder", path)
	p[path] = true
	for i := range path {
		if path[i] == '/' {
			Corrupt.when(p[path[:i]], "%q lies in a file", path)
			p[path[:i]] = false
		}
	}
}

// checkBlocks checks section 3, Block.
func (d *Directory) checkBlocks() {
	seen := make(map[string]bool, len(d.Blocks))
	for _, b := range d.Blocks {
		name := d.Text(b.Name)
		Corrupt.when(seen[name], "two blocks have the name %q", name)
		seen[name] = true
	}
}

// checkSections checks section 3, Section, the places of section 2, and the
// count of section 4.
func (d *Directory) checkSections(directoryOffset uint64) {
	at, chunks := uint64(headBytes), uint64(0) // where the next section starts
	var before Section
	for i, s := range d.Sections {
		ascends := before.Block < s.Block || (before.Block == s.Block && before.Kind < s.Kind)
		Corrupt.when(!ascends, "section %d is out of order", i)
		Corrupt.when(s.Reserved != 0, "reserved of section %d is %d", i, s.Reserved)
		outside := s.Block != none && s.Block >= uint64(len(d.Blocks))
		Corrupt.when(outside, "section %d is of block %d", i, s.Block)
		ofNone := s.Kind == sectionPrefix || s.Kind == sectionSide
		wrong := s.known() && ofNone != (s.Block == none)
		Corrupt.when(wrong, "section %d of kind %d has a block, or lacks one", i, s.Kind)
		Corrupt.when(s.Offset != at, "section %d starts at %d and not at %d", i, s.Offset, at)
		wrong = s.Length == 0 || s.Length > directoryOffset-at
		Corrupt.when(wrong, "section %d has %d bytes", i, s.Length)
		at = align(at+s.Length, sectionAlignment)
		d.firstChecksum = append(d.firstChecksum, chunks)
		chunks += ceilDiv(s.Length, chunkBytes)
		before = s
	}
	Corrupt.when(at != directoryOffset, "the directory does not start at %d", at)
	found := uint64(len(d.Checksums))
	Corrupt.when(found != chunks, "%d checksums for %d chunks", found, chunks)
}

// checkTensors checks section 3, Tensor, and section 5.
func (d *Directory) checkTensors() {
	before := ""
	for i := range d.Tensors {
		t := &d.Tensors[i]
		name := d.Text(t.Name)
		Corrupt.when(name <= before, "tensor %q is out of order", name)
		before = name
		Corrupt.when(t.Block >= uint64(len(d.Blocks)), "tensor %q is of block %d", name, t.Block)
		weights := t.File < uint64(len(d.Files)) && d.Files[t.File].Kind == FileWeights
		Corrupt.when(!weights, "tensor %q is of file %d, which is no weights file", name, t.File)
		count := t.DimensionCount
		Limit.when(count > maxDimensions, "tensor %q has %d dimensions", name, count)
		for _, n := range t.Shape[count:] {
			Corrupt.when(n != 0, "tensor %q has a shape beyond dimension_count", name)
		}
		_, size := t.Measure()
		length := d.Files[t.File].Length
		beyond := t.FileOffset > length || size > length-t.FileOffset
		Corrupt.when(beyond, "tensor %q ends beyond its file", name)
	}
}

// checkOwners checks that each array has one owner, in order (3, Array).
func (d *Directory) checkOwners() {
	next, all := uint64(0), uint64(len(d.Arrays))
	own := func(o Owner) {
		wrong := o.FirstArray != next || o.ArrayCount > all-next
		Corrupt.when(wrong, "arrays %d and %d more are not the next ones", o.FirstArray, o.ArrayCount)
		next += o.ArrayCount
	}
	for _, f := range d.Files {
		own(f.Owner)
	}
	for _, t := range d.Tensors {
		own(t.Owner)
	}
	Corrupt.when(next != all, "%d arrays belong to nobody", all-next)
}

// checkPacking checks that arrays fill their sections (3, Array).
func (d *Directory) checkPacking() {
	ends := make([]uint64, len(d.Sections)) // of the last array so far
	for i, a := range d.Arrays {
		Corrupt.when(a.Section >= uint64(len(ends)), "array %d is in section %d", i, a.Section)
		want, length := align(ends[a.Section], arrayAlignment), d.Sections[a.Section].Length
		Corrupt.when(a.Offset != want, "array %d starts at %d and not at %d", i, a.Offset, want)
		wrong := a.Length == 0 || want > length || a.Length > length-want
		Corrupt.when(wrong, "array %d has %d bytes", i, a.Length)
		ends[a.Section] = want + a.Length
	}
	for i, s := range d.Sections {
		wrong := s.known() && s.Length != ends[i]
		Corrupt.when(wrong, "section %d has %d bytes, its arrays end at %d", i, s.Length, ends[i])
	}
}

// checkFileArrays checks number, places and lengths of the arrays of files (3).
func (d *Directory) checkFileArrays() {
	for _, f := range d.Files {
		path, arrays := d.Text(f.Path), d.arraysOf(f.Owner)
		count := 0
		if f.Kind == FileWeights || (f.Kind == FileSide && f.Length > 0) {
			count = 1
		}
		Corrupt.when(len(arrays) != count, "file %q has %d arrays", path, len(arrays))
		for _, a := range arrays {
			kind, fits := uint32(sectionSide), a.Length == f.Length
			if f.Kind == FileWeights {
				kind, fits = sectionPrefix, a.Length <= f.Length
			}
			wrong := d.Sections[a.Section].Kind != kind || !fits
			Corrupt.when(wrong, "the array of file %q is in a wrong section, or too long", path)
		}
	}
}

// checkEncodings checks what section 6 demands of the directory. Of an unknown
// dtype this is known of an alias alone (3, Tensor).
func (d *Directory) checkEncodings() {
	aliases := map[uint64]int{}
	for i := range d.Tensors {
		t := &d.Tensors[i]
		for _, a := range d.arraysOf(t.Owner) {
			other := d.Sections[a.Section].Block != t.Block
			Corrupt.when(other, "an array of tensor %q is in another block", d.Text(t.Name))
		}
		if t.Encoding == encodingAlias {
			d.checkAlias(t)
			aliases[t.Parameters[0]]++
			many := aliases[t.Parameters[0]] > maxAliases
			Limit.when(many, "more than %d aliases of one tensor", maxAliases)
		} else if knownDtype(t.Dtype) && t.Encoding <= encodingDelta {
			d.checkStored(t)
		}
	}
}

// checkAlias checks 6.1, for any dtype and any encoding of the target.
func (d *Directory) checkAlias(t *Tensor) {
	name := d.Text(t.Name)
	wrong := t.ArrayCount != 0 || t.Parameters[0] >= uint64(len(d.Tensors)) ||
		t.Parameters != [4]uint64{t.Parameters[0]}
	Corrupt.when(wrong, "alias %q has an array, no target or another parameter", name)
	o := &d.Tensors[t.Parameters[0]]
	same := o.Block == t.Block && o.Dtype == t.Dtype && o.DimensionCount == t.DimensionCount &&
		o.Shape == t.Shape && o.Hash == t.Hash && o.Encoding != encodingAlias
	Corrupt.when(!same, "alias %q is unlike its target", name)
}

// kindsOf are the kinds of the sections that hold the arrays of an encoding, in
// order.
var kindsOf = map[uint32][]uint32{
	encodingRaw:   {sectionRaw},
	encodingGap:   {sectionCodebook, sectionIndex, sectionIndex, sectionBitstream, sectionPlane},
	encodingTile:  {sectionCodebook, sectionIndex, sectionBitstream, sectionPlane},
	encodingFloat: {sectionCodebook, sectionIndex, sectionBitstream, sectionPlane},
	encodingDelta: {sectionCodebook, sectionIndex, sectionBitstream},
}

// checkStored checks 6.2 to 6.6. The plane comes first, so that nothing
// overflows later.
func (d *Directory) checkStored(t *Tensor) {
	name, arrays, kinds := d.Text(t.Name), d.arraysOf(t.Owner), kindsOf[t.Encoding]
	elements, size := t.Measure()
	if t.Encoding == encodingRaw && size == 0 {
		kinds = nil
	}
	Corrupt.when(len(arrays) != len(kinds), "tensor %q has %d arrays", name, len(arrays))
	for i, a := range arrays {
		wrong := d.Sections[a.Section].Kind != kinds[i]
		Corrupt.when(wrong, "array %d of tensor %q is in a wrong section", i, name)
	}
	lengths, named := []uint64{size}, 0
	if t.Encoding == encodingDelta {
		wrong := elements == 0 || t.Dtype != dtypeBF16
		Corrupt.when(wrong, "tensor %q has no weights of a dtype of its encoding", name)
		lengths, named = shapeOfDelta(t, arrays), 4
	} else if t.Encoding != encodingRaw {
		wrong := elements == 0 || t.Dtype != dtypeBF16
		if named = 3; t.Encoding == encodingFloat {
			named = 4
			wrong = elements == 0 || !allowsZeroBits(t.Dtype, t.Parameters[3])
		}
		Corrupt.when(wrong, "tensor %q has no weights of a dtype of its encoding", name)
		plane := arrays[len(arrays)-1].Length
		wrong = plane != t.split().planeBytes(elements)
		Corrupt.when(wrong, "the plane of tensor %q has %d bytes", name, plane)
		if t.Encoding == encodingGap {
			lengths = shapeOfGap(t, arrays[0].Length).lengths
		} else {
			lengths = shapeOfTile(t, arrays[0].Length).lengths
		}
	}
	for _, p := range t.Parameters[named:] {
		Corrupt.when(p != 0, "tensor %q has a parameter that its encoding does not name", name)
	}
	for i, a := range arrays {
		Corrupt.when(a.Length != lengths[i], "array %d of tensor %q has %d bytes and not %d",
			i, name, a.Length, lengths[i])
	}
}
