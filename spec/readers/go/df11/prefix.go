package df11

import (
	"encoding/binary"
	"sort"
)

// headerEntry is a tensor as the safetensors header describes it (7).
type headerEntry struct {
	dtype      string
	shape      []uint64
	begin, end uint64
}

// parsePrefix reads the prefix of a weights file, all of it.
func parsePrefix(prefix []byte) (map[string]headerEntry, error) {
	if len(prefix) < 8 {
		return nil, corrupt("a prefix has %d bytes", len(prefix))
	}
	if n := binary.LittleEndian.Uint64(prefix); n != uint64(len(prefix))-8 {
		return nil, corrupt("a prefix of %d bytes says that its header has %d", len(prefix), n)
	}
	j := &jsonReader{b: prefix[8:]}
	entries := map[string]headerEntry{}
	err := j.text(func(key string) error {
		if key == "__metadata__" {
			return j.headerMetadata()
		}
		e, err := j.headerEntry()
		entries[key] = e
		return err
	})
	return entries, err
}

// headerMetadata reads null, or an object whose members are strings.
func (j *jsonReader) headerMetadata() error {
	if j.peek() == 'n' && j.word("null") {
		return nil
	}
	return j.object(func(string) error {
		j.peek()
		_, err := j.string()
		return err
	})
}

func (j *jsonReader) headerEntry() (e headerEntry, err error) {
	var dtype, shape, offsets bool
	err = j.object(func(key string) (err error) {
		switch key {
		case "dtype":
			dtype = true
			e.dtype, err = j.string()
		case "shape":
			shape = true
			e.shape, err = j.integers(maxDimensions)
		case "data_offsets":
			offsets = true
			e.begin, e.end, err = j.dataOffsets()
		default:
			err = j.skip()
		}
		return err
	})
	if err == nil && !(dtype && shape && offsets) {
		err = j.fail("a tensor lacks dtype, shape or data_offsets")
	}
	return e, err
}

func (j *jsonReader) integers(most int) ([]uint64, error) {
	var out []uint64
	err := j.array(func() error {
		n, err := j.integer()
		if out = append(out, n); err == nil && len(out) > most {
			err = j.fail("too many integers")
		}
		return err
	})
	return out, err
}

func (j *jsonReader) dataOffsets() (begin, end uint64, err error) {
	both, err := j.integers(2)
	if err == nil && len(both) != 2 {
		err = j.fail("data_offsets are two")
	}
	if err != nil {
		return 0, 0, err
	}
	return both[0], both[1], nil
}

// checkPrefix compares the header of a weights file with the directory (7).
func checkPrefix(prefix []byte, f *File, tensors []*Tensor) error {
	entries, err := parsePrefix(prefix)
	if err != nil {
		return err
	}
	if err := checkOffsets(entries, f.Length-uint64(len(prefix))); err != nil {
		return err
	}
	if len(entries) != len(tensors) {
		return corrupt("the header of %q has %d tensors, the directory %d",
			f.Path, len(entries), len(tensors))
	}
	for _, t := range tensors {
		e, ok := entries[t.Name]
		if !ok {
			return corrupt("the header of %q lacks tensor %q", f.Path, t.Name)
		}
		if err := t.checkEntry(&e, uint64(len(prefix))); err != nil {
			return err
		}
	}
	return nil
}

// checkOffsets checks that the tensors of a header fill their file.
func checkOffsets(entries map[string]headerEntry, length uint64) error {
	all := make([]headerEntry, 0, len(entries))
	for _, e := range entries {
		all = append(all, e)
	}
	sort.Slice(all, func(i, k int) bool {
		if all[i].begin != all[k].begin {
			return all[i].begin < all[k].begin
		}
		return all[i].end < all[k].end
	})
	at := uint64(0)
	for _, e := range all {
		if e.begin != at || e.end < e.begin {
			return corrupt("a tensor of the header begins at %d and not at %d", e.begin, at)
		}
		at = e.end
	}
	if at != length {
		return corrupt("the tensors of a header end at %d, the file at %d", at, length)
	}
	return nil
}

// checkEntry compares a tensor of the header with its record.
func (t *Tensor) checkEntry(e *headerEntry, prefix uint64) error {
	if uint64(len(e.shape)) != t.DimensionCount {
		return corrupt("the header has another shape of tensor %q", t.Name)
	}
	for i, n := range e.shape {
		if n != t.Shape[i] {
			return corrupt("the header has another shape of tensor %q", t.Name)
		}
	}
	if t.FileOffset < prefix || e.begin != t.FileOffset-prefix {
		return corrupt("the header has another place of tensor %q", t.Name)
	}
	if !knownDtype(t.Dtype) {
		if isDtypeName(e.dtype) {
			return corrupt("the header has a known dtype of tensor %q", t.Name)
		}
		return nil
	}
	if e.dtype != dtypes[t.Dtype].name || e.end-e.begin != t.Size {
		return corrupt("the header has another dtype or size of tensor %q", t.Name)
	}
	return nil
}
