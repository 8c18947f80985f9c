package df11

import "strings"

// checkKinds takes step 10 of section 9.
func (d *Directory) checkKinds() error {
	for i := range d.Files {
		if k := d.Files[i].Kind; k > FileBeside {
			return unsupported("file kind %d", k)
		}
	}
	for i := range d.Sections {
		k := d.Sections[i].Kind
		if !knownSection(k) && k < sectionSkippable {
			return unsupported("section kind %d", k)
		}
	}
	return nil
}

func (d *Directory) checkShards() error {
	switch {
	case d.ShardCount == 0:
		return corrupt("shard_count is 0")
	case d.ShardCount > maxShards:
		return limit("shard_count is %d", d.ShardCount)
	case d.ShardIndex >= d.ShardCount:
		return corrupt("shard_index is %d of %d", d.ShardIndex, d.ShardCount)
	}
	return nil
}

// checkFiles checks section 3, File, less arrays.
func (d *Directory) checkFiles() error {
	if len(d.Files) > maxFiles {
		return limit("%d files", len(d.Files))
	}
	for i := range d.Files {
		f := &d.Files[i]
		if err := checkFile(f, d.ShardIndex); err != nil {
			return err
		}
		if i > 0 && !filesAscend(&d.Files[i-1], f) {
			return corrupt("file %q is out of order", f.Path)
		}
	}
	set := newPathSet()
	for i := range d.Files {
		if err := set.add(d.Files[i].Path); err != nil {
			return err
		}
		if len(set.folders) > maxFolders {
			return limit("more than %d folders", maxFolders)
		}
	}
	return set.check()
}

func filesAscend(a, b *File) bool {
	return a.Kind < b.Kind || (a.Kind == b.Kind && a.Path < b.Path)
}

func checkFile(f *File, shard uint64) error {
	if f.reserved != 0 {
		return corrupt("reserved of file %q is %d", f.Path, f.reserved)
	}
	if err := checkPath(f.Path); err != nil {
		return err
	}
	if f.Kind == FileBeside && strings.HasSuffix(f.Path, ".df11") {
		return corrupt("file %q beside the containers ends in .df11", f.Path)
	}
	if f.Kind != FileWeights && shard != 0 {
		return corrupt("side file %q in shard %d", f.Path, shard)
	}
	if f.arrayCount != wantedArrays(f) {
		return corrupt("file %q has %d arrays", f.Path, f.arrayCount)
	}
	return nil
}

// wantedArrays is what the table says at array_count.
func wantedArrays(f *File) uint64 {
	if f.Kind == FileWeights || (f.Kind == FileSide && f.Length > 0) {
		return 1
	}
	return 0
}

// checkBlocks checks section 3, Block.
func (d *Directory) checkBlocks() error {
	seen := make(map[string]bool, len(d.Blocks))
	for i := range d.Blocks {
		name := d.Blocks[i].Name
		if seen[name] {
			return corrupt("two blocks have the name %q", name)
		}
		seen[name] = true
	}
	return nil
}
