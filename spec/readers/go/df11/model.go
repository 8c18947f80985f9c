package df11

import (
	"encoding/binary"
	"sort"

	"df11go/blake3"
)

// Model is one container, or several shards of one model (8).
type Model struct {
	Shards []*Container
	Folder string // that holds the files of kind beside; empty if not known
}

// original is a file of a model, with its path and its container.
type original struct {
	*File
	path string
	c    *Container
	i    int // in its container
}

// NewModel checks that containers are shards of one model, of which a path or
// a name occurs once.
func NewModel(folder string, shards ...*Container) (*Model, error) {
	m := &Model{shards, folder}
	return m, try(func() {
		Corrupt.when(len(shards) == 0, "no containers")
		indices, names, paths := map[uint64]bool{}, map[string]bool{}, newPathSet()
		for _, c := range shards {
			other := c.Identity != shards[0].Identity || c.ShardCount != shards[0].ShardCount
			Corrupt.when(other, "two containers are of different models")
			Corrupt.when(indices[c.ShardIndex], "two containers are shard %d", c.ShardIndex)
			indices[c.ShardIndex] = true
			for _, t := range c.Tensors {
				name := c.Text(t.Name)
				Corrupt.when(names[name], "two shards have a tensor %q", name)
				names[name] = true
			}
		}
		for _, f := range m.files() {
			paths.add(f.path)
		}
		paths.check()
	})
}

// files are all files of the model, in ascending order of their paths.
func (m *Model) files() (out []original) {
	for _, c := range m.Shards {
		for i := range c.Files {
			f := &c.Files[i]
			out = append(out, original{f, c.Text(f.Path), c, i})
		}
	}
	sort.SliceStable(out, func(i, k int) bool { return out[i].path < out[k].path })
	return out
}

// identity computes the identity of a complete model (8, Identity).
func (m *Model) identity() Hash {
	h := blake3.New()
	for _, f := range m.files() {
		kind := byte(0)
		if f.Kind == FileWeights {
			kind = 1
		}
		record := binary.LittleEndian.AppendUint64([]byte{kind}, uint64(len(f.path)))
		record = append(record, f.path...)
		record = binary.LittleEndian.AppendUint64(record, f.Length)
		_, _ = h.Write(append(record, f.Hash[:]...))
	}
	return h.Sum()
}

// Verify checks all that it can (9).
func (m *Model) Verify() *Report {
	r := &Report{}
	for _, c := range m.Shards {
		c.verify(r)
	}
	for _, f := range m.files() {
		if f.Kind == FileBeside && m.Folder != "" {
			r.try(func() { m.findBeside(f) })
		} else if f.Kind == FileBeside {
			r.skip("file %q beside the container: its folder is not known", f.path)
		}
	}
	if there, all := len(m.Shards), m.Shards[0].ShardCount; uint64(there) < all {
		r.skip("the identity: %d of %d shards are there", there, all)
	} else {
		r.try(func() { Corrupt.when(m.identity() != m.Shards[0].Identity, "the identity is wrong") })
	}
	return r
}
