package df11

import (
	"strings"
	"unicode/utf8"
)

// check takes the steps 10 and 11 of section 9. Later checks rely on those
// before them.
func (d *Directory) check(directoryOffset uint64) {
	for i := range d.Files {
		kind := d.Files[i].Kind
		Unsupported.when(kind > FileBeside, "file kind %d", kind)
	}
	for i := range d.Sections {
		kind := d.Sections[i].Kind
		Unsupported.when(!knownSection(kind) && kind < sectionSkippable, "section kind %d", kind)
	}
	Corrupt.when(d.ShardCount == 0, "shard_count is 0")
	Limit.when(d.ShardCount > maxShards, "shard_count is %d", d.ShardCount)
	outside := d.ShardIndex >= d.ShardCount
	Corrupt.when(outside, "shard_index is %d of %d", d.ShardIndex, d.ShardCount)
	d.checkText()
	d.checkMetadata()
	d.checkFiles()
	d.checkBlocks()
	d.checkSections(directoryOffset)
	for i := range d.Tensors {
		d.checkTensor(i)
	}
	d.checkOwners()
	d.checkPacking()
	d.checkFileArrays()
	d.checkEncodings()
	d.countChecksums()
}

// checkText checks that paths, names, keys and values lie in the text in their
// order and back to back (3, Text). Limits come first, so that a huge length
// is a Limit.
func (d *Directory) checkText() {
	at, all := uint64(0), uint64(len(d.text))
	next := func(t Text, least, most uint64, what string) {
		Limit.when(t.Length > most, "a %s has %d bytes", what, t.Length)
		Corrupt.when(t.Length < least, "a %s has no bytes", what)
		Corrupt.when(t.Offset != at, "a %s does not start where the text before ends", what)
		Corrupt.when(t.Length > all-at, "a %s ends beyond the text", what)
		s := d.Text(t)
		bad := !utf8.ValidString(s) || strings.IndexByte(s, 0) >= 0
		Corrupt.when(bad, "a %s is not UTF-8 without NUL", what)
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
	total := uint64(0)
	for i, m := range d.Metadata {
		total += m.Key.Length + m.Value.Length
		ascends := i == 0 || d.Text(d.Metadata[i-1].Key) < d.Text(m.Key)
		Corrupt.when(!ascends, "keys of the metadata do not ascend")
	}
	Limit.when(total > maxMetadataBytes, "metadata of %d bytes", total)
}

// checkFiles checks section 3, File, less arrays.
func (d *Directory) checkFiles() {
	Limit.when(len(d.Files) > maxFiles, "%d files", len(d.Files))
	paths := newPathSet()
	for i := range d.Files {
		d.checkFile(&d.Files[i])
		path := d.Text(d.Files[i].Path)
		if i > 0 {
			a, kind := &d.Files[i-1], d.Files[i].Kind
			ascends := a.Kind < kind || (a.Kind == kind && d.Text(a.Path) < path)
			Corrupt.when(!ascends, "file %q is out of order", path)
		}
		paths.add(path)
		Limit.when(len(paths.folders) > maxFolders, "more than %d folders", maxFolders)
	}
	paths.check()
}

func (d *Directory) checkFile(f *File) {
	path := d.Text(f.Path)
	Corrupt.when(f.Reserved != 0, "reserved of file %q is %d", path, f.Reserved)
	checkPath(path)
	taken := f.Kind == FileBeside && strings.HasSuffix(path, ".df11")
	Corrupt.when(taken, "file %q beside the containers ends in .df11", path)
	late := f.Kind != FileWeights && d.ShardIndex != 0
	Corrupt.when(late, "side file %q in shard %d", path, d.ShardIndex)
	arrays := uint64(0)
	if f.Kind == FileWeights || (f.Kind == FileSide && f.Length > 0) {
		arrays = 1
	}
	Corrupt.when(f.ArrayCount != arrays, "file %q has %d arrays", path, f.ArrayCount)
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

// pathSet collects the paths of files that one folder is to hold.
type pathSet struct{ paths, folders map[string]bool }

func newPathSet() *pathSet {
	return &pathSet{map[string]bool{}, map[string]bool{}}
}

// add refuses a path that is there already.
func (s *pathSet) add(path string) {
	Corrupt.when(s.paths[path], "two files have the path %q", path)
	s.paths[path] = true
	for i := range path {
		if path[i] == '/' {
			s.folders[path[:i]] = true
		}
	}
}

// check refuses a path that is another one followed by `/` and more.
func (s *pathSet) check() {
	for folder := range s.folders {
		Corrupt.when(s.paths[folder], "%q is the path of a file and of a folder", folder)
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

// checkSections checks section 3, Section, and the places of section 2. It
// rounds only what lies before the directory, which cannot overflow.
func (d *Directory) checkSections(directoryOffset uint64) {
	at := uint64(headBytes) // where the next section starts
	for i := range d.Sections {
		s := &d.Sections[i]
		if i > 0 {
			a := &d.Sections[i-1]
			ascends := a.Block < s.Block || (a.Block == s.Block && a.Kind < s.Kind)
			Corrupt.when(!ascends, "section %d is out of order", i)
		}
		Corrupt.when(s.Reserved != 0, "reserved of section %d is %d", i, s.Reserved)
		outside := s.Block != none && s.Block >= uint64(len(d.Blocks))
		Corrupt.when(outside, "section %d is of block %d", i, s.Block)
		ofNone := s.Kind == sectionPrefix || s.Kind == sectionSide
		wrong := knownSection(s.Kind) && ofNone != (s.Block == none)
		Corrupt.when(wrong, "section %d of kind %d has a block, or lacks one", i, s.Kind)
		Corrupt.when(s.Offset != at, "section %d starts at %d and not at %d", i, s.Offset, at)
		Corrupt.when(s.Length == 0, "section %d has no bytes", i)
		end := add(s.Offset, s.Length)
		Corrupt.when(end > directoryOffset, "section %d ends beyond the directory's start", i)
		at = align(end, sectionAlignment)
	}
	wrong := at != directoryOffset
	Corrupt.when(wrong, "the directory starts at %d and not at %d", directoryOffset, at)
}

// checkTensor checks section 3, Tensor, and section 5.
func (d *Directory) checkTensor(i int) {
	t := &d.Tensors[i]
	name := d.Text(t.Name)
	ascends := i == 0 || d.Text(d.Tensors[i-1].Name) < name
	Corrupt.when(!ascends, "tensor %q is out of order", name)
	Corrupt.when(t.Block >= uint64(len(d.Blocks)), "tensor %q is of block %d", name, t.Block)
	weights := t.File < uint64(len(d.Files)) && d.Files[t.File].Kind == FileWeights
	Corrupt.when(!weights, "tensor %q is of file %d, which is no weights file", name, t.File)
	dimensions := t.DimensionCount
	Limit.when(dimensions > maxDimensions, "tensor %q has %d dimensions", name, dimensions)
	for _, n := range t.Shape[dimensions:] {
		Corrupt.when(n != 0, "tensor %q has a shape beyond dimension_count", name)
	}
	_, size := t.Measure()
	end := add(t.FileOffset, size)
	Corrupt.when(end > d.Files[t.File].Length, "tensor %q ends beyond its file", name)
}

// checkOwners checks that each array has one owner, in order (3, Array).
func (d *Directory) checkOwners() {
	next, all := uint64(0), uint64(len(d.Arrays))
	own := func(first, count uint64) {
		Corrupt.when(first != next, "first_array is %d and not %d", first, next)
		Corrupt.when(count > all-next, "a record has %d arrays, more than there are", count)
		next += count
	}
	for i := range d.Files {
		own(d.Files[i].FirstArray, d.Files[i].ArrayCount)
	}
	for i := range d.Tensors {
		own(d.Tensors[i].FirstArray, d.Tensors[i].ArrayCount)
	}
	Corrupt.when(next != all, "%d arrays belong to nobody", all-next)
}

// checkPacking checks that arrays fill their sections (3, Array).
func (d *Directory) checkPacking() {
	ends := make([]uint64, len(d.Sections)) // of the last array so far
	for i, a := range d.Arrays {
		Corrupt.when(a.Section >= uint64(len(ends)), "array %d is in section %d", i, a.Section)
		Corrupt.when(a.Length == 0, "array %d has no bytes", i)
		want := align(ends[a.Section], arrayAlignment)
		Corrupt.when(a.Offset != want, "array %d starts at %d and not at %d", i, a.Offset, want)
		end := add(a.Offset, a.Length)
		beyond := end > d.Sections[a.Section].Length
		Corrupt.when(beyond, "array %d ends beyond its section", i)
		ends[a.Section] = end
	}
	for i, s := range d.Sections {
		wrong := knownSection(s.Kind) && s.Length != ends[i]
		Corrupt.when(wrong, "section %d has %d bytes, its arrays end at %d", i, s.Length, ends[i])
	}
}

// checkFileArrays checks where the arrays of files lie (3, Array).
func (d *Directory) checkFileArrays() {
	for i := range d.Files {
		f := &d.Files[i]
		for _, a := range d.arraysOfFile(f) {
			kind, fits := uint32(sectionSide), a.Length == f.Length
			if f.Kind == FileWeights {
				kind, fits = sectionPrefix, a.Length <= f.Length
			}
			wrong := d.Sections[a.Section].Kind != kind
			Corrupt.when(wrong, "the array of file %q is in a wrong section", d.Text(f.Path))
			Corrupt.when(!fits, "the array of file %q has %d bytes", d.Text(f.Path), a.Length)
		}
	}
}

// checkEncodings checks what section 6 demands of the directory. Of an unknown
// dtype this is known of an alias alone (3, Tensor).
func (d *Directory) checkEncodings() {
	named := [...]int{encodingAlias: 1, encodingRaw: 0, encodingGap: 3, encodingTile: 3}
	checks := [...]func(*Directory, *Tensor){
		(*Directory).checkAlias, (*Directory).checkRaw, (*Directory).checkGap, (*Directory).checkTile,
	}
	aliases := map[uint64]int{}
	for i := range d.Tensors {
		t := &d.Tensors[i]
		name := d.Text(t.Name)
		for _, a := range d.arraysOf(t) {
			other := d.Sections[a.Section].Block != t.Block
			Corrupt.when(other, "an array of tensor %q is in another block", name)
		}
		if t.Encoding > encodingTile || (t.Encoding != encodingAlias && !knownDtype(t.Dtype)) {
			continue
		}
		for _, p := range t.Parameters[named[t.Encoding]:] {
			Corrupt.when(p != 0, "tensor %q has a parameter that its encoding does not name", name)
		}
		checks[t.Encoding](d, t)
		if t.Encoding == encodingAlias {
			aliases[t.Parameters[0]]++
			many := aliases[t.Parameters[0]] > maxAliases
			Limit.when(many, "more than %d aliases of one tensor", maxAliases)
		}
	}
}

// checkAlias checks 6.1, for any dtype and any encoding of the target.
func (d *Directory) checkAlias(t *Tensor) {
	name := d.Text(t.Name)
	Corrupt.when(t.ArrayCount != 0, "alias %q has an array", name)
	outside := t.Parameters[0] >= uint64(len(d.Tensors))
	Corrupt.when(outside, "the target of alias %q does not exist", name)
	o := &d.Tensors[t.Parameters[0]]
	Corrupt.when(o.Encoding == encodingAlias, "the target of alias %q is an alias", name)
	same := o.Block == t.Block && o.Dtype == t.Dtype && o.DimensionCount == t.DimensionCount &&
		o.Shape == t.Shape && o.Hash == t.Hash
	Corrupt.when(!same, "alias %q is unlike its target", name)
}

// checkRaw checks 6.2.
func (d *Directory) checkRaw(t *Tensor) {
	if _, size := t.Measure(); size > 0 {
		d.checkKinds(t, sectionRaw)
		d.checkLengths(t, size)
	} else {
		d.checkKinds(t)
	}
}

// checkCoded checks what 6.3 and 6.4 share, before parameters: the plane comes
// first, so that nothing overflows later. It returns the elements, and the
// length of the codebook.
func (d *Directory) checkCoded(t *Tensor, kinds ...uint32) (elements, codebook uint64) {
	elements, _ = t.Measure()
	name := d.Text(t.Name)
	Corrupt.when(t.Dtype != dtypeBF16 || elements == 0, "tensor %q has no BF16 weights", name)
	d.checkKinds(t, kinds...)
	arrays := d.arraysOf(t)
	plane := arrays[len(arrays)-1].Length
	Corrupt.when(plane != elements, "the plane of tensor %q has %d bytes", name, plane)
	return elements, arrays[0].Length
}

// checkKinds checks number and sections of the arrays of a tensor.
func (d *Directory) checkKinds(t *Tensor, kinds ...uint32) {
	name := d.Text(t.Name)
	Corrupt.when(t.ArrayCount != uint64(len(kinds)), "tensor %q has %d arrays", name, t.ArrayCount)
	for i, a := range d.arraysOf(t) {
		wrong := d.Sections[a.Section].Kind != kinds[i]
		Corrupt.when(wrong, "array %d of tensor %q is in a wrong section", i, name)
	}
}

// checkLengths checks the lengths of the arrays of a tensor, whose number was
// checked.
func (d *Directory) checkLengths(t *Tensor, lengths ...uint64) {
	for i, a := range d.arraysOf(t) {
		Corrupt.when(a.Length != lengths[i], "array %d of tensor %q has %d bytes and not %d",
			i, d.Text(t.Name), a.Length, lengths[i])
	}
}

// countChecksums checks the count of section 4. All sections lie in the file,
// so the sum does not overflow.
func (d *Directory) countChecksums() {
	count := uint64(0)
	for i := range d.Sections {
		d.firstChecksum = append(d.firstChecksum, count)
		count += ceilDiv(d.Sections[i].Length, chunkBytes)
	}
	found := uint64(len(d.Checksums))
	Corrupt.when(found != count, "%d checksums for %d chunks", found, count)
}
