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

// NewModel checks that containers are shards of one model.
func NewModel(shards ...*Container) (*Model, error) {
	m := &Model{Shards: shards}
	if err := first(m.checkShards, m.checkNames, m.checkPaths); err != nil {
		return nil, err
	}
	return m, nil
}

func (m *Model) checkShards() error {
	if len(m.Shards) == 0 {
		return corrupt("no containers")
	}
	seen := map[uint64]bool{}
	for _, c := range m.Shards {
		if c.Identity != m.Shards[0].Identity || c.ShardCount != m.Shards[0].ShardCount {
			return corrupt("two containers are of different models")
		}
		if seen[c.ShardIndex] {
			return corrupt("two containers are shard %d", c.ShardIndex)
		}
		seen[c.ShardIndex] = true
	}
	return nil
}

func (m *Model) checkNames() error {
	if len(m.Shards) == 1 {
		return nil // checked when it was opened
	}
	seen := map[string]bool{}
	for _, c := range m.Shards {
		for i := range c.Tensors {
			if seen[c.Tensors[i].Name] {
				return corrupt("two shards have a tensor %q", c.Tensors[i].Name)
			}
			seen[c.Tensors[i].Name] = true
		}
	}
	return nil
}

func (m *Model) checkPaths() error {
	set := newPathSet()
	for _, f := range m.files() {
		if err := set.add(f.Path); err != nil {
			return err
		}
	}
	return set.check()
}

// files are all files of the model, in ascending order of their paths.
func (m *Model) files() []*File {
	var out []*File
	for _, c := range m.Shards {
		for i := range c.Files {
			out = append(out, &c.Files[i])
		}
	}
	sort.SliceStable(out, func(i, k int) bool { return out[i].Path < out[k].Path })
	return out
}

// Complete tells whether all shards are there.
func (m *Model) Complete() bool {
	return uint64(len(m.Shards)) == m.Shards[0].ShardCount
}

// identity computes the identity of a complete model (8, Identity).
func (m *Model) identity() Hash {
	h := blake3.New()
	for _, f := range m.files() {
		kind := byte(0)
		if f.Kind == FileWeights {
			kind = 1
		}
		record := []byte{kind}
		record = binary.LittleEndian.AppendUint64(record, uint64(len(f.Path)))
		record = append(record, f.Path...)
		record = binary.LittleEndian.AppendUint64(record, f.Length)
		record = append(record, f.Hash[:]...)
		_, _ = h.Write(record)
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
		if f.Kind != FileBeside {
			continue
		}
		if m.Folder == "" {
			r.skip("file %q beside the container: its folder is not known", f.Path)
			continue
		}
		_, err := m.findBeside(f)
		r.add(err)
	}
	if !m.Complete() {
		r.skip("the identity: %d of %d shards are there", len(m.Shards), m.Shards[0].ShardCount)
	} else if m.identity() != m.Shards[0].Identity {
		r.add(corrupt("the identity is wrong"))
	}
	return r
}
