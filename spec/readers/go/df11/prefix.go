package df11

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"regexp"
	"sort"
	"strconv"
	"unicode/utf8"
)

// maxDepth is the number of arrays and objects in each other that are read;
// more are Corrupt (7).
const maxDepth = 100

// escapes are pairs of surrogates, then halves of one, then all others.
var escapes = regexp.MustCompile(
	`\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F])|.)`)

// header reads a JSON text as strictly as section 7 wants it: an object, with
// json.Number for numbers.
func header(text []byte) map[string]any {
	wrong := !utf8.Valid(text) || !json.Valid(text)
	Corrupt.when(wrong, "a header is no JSON in UTF-8")
	for _, e := range escapes.FindAllSubmatch(text, -1) {
		Corrupt.when(e[1] != nil, "a header has half a surrogate pair")
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	object, ok := value(d, 1).(map[string]any)
	Corrupt.when(!ok, "a header is no object")
	return object
}

// value reads a value of valid JSON, whose objects have no key twice.
func value(d *json.Decoder, depth int) any {
	token, err := d.Token()
	check(err)
	switch token := token.(type) {
	case json.Number:
		_, err := strconv.ParseFloat(string(token), 64)
		Corrupt.when(err != nil, "a number is beyond the range of a double")
		return token
	case json.Delim:
		Corrupt.when(depth > maxDepth, "a header is nested too deep")
		list, object := []any{}, map[string]any{}
		for d.More() {
			if token == '[' {
				list = append(list, value(d, depth+1))
				continue
			}
			key := value(d, depth+1).(string)
			_, taken := object[key]
			Corrupt.when(taken, "two members have the name %q", key)
			object[key] = value(d, depth+1)
		}
		_, err := d.Token()
		check(err)
		if token == '[' {
			return list
		}
		return object
	}
	return token
}

// headerEntry is a tensor as the safetensors header describes it (7).
type headerEntry struct {
	dtype      string
	shape      []uint64
	begin, end uint64
}

// parsePrefix reads the prefix of a weights file, all of it.
func parsePrefix(prefix []byte) map[string]headerEntry {
	Corrupt.when(len(prefix) < 8, "a prefix has %d bytes", len(prefix))
	n := binary.LittleEndian.Uint64(prefix)
	wrong := n != uint64(len(prefix))-8
	Corrupt.when(wrong, "a prefix of %d bytes says that its header has %d", len(prefix), n)
	entries := map[string]headerEntry{}
	for name, member := range header(prefix[8:]) {
		if name != "__metadata__" {
			entries[name] = entryOf(name, member)
		} else if member != nil {
			checkStrings(member)
		}
	}
	return entries
}

func checkStrings(member any) {
	object, ok := member.(map[string]any)
	for _, v := range object {
		_, isString := v.(string)
		ok = ok && isString
	}
	Corrupt.when(!ok, "__metadata__ is no object of strings")
}

func entryOf(name string, member any) headerEntry {
	object, _ := member.(map[string]any)
	dtype, ok := object["dtype"].(string)
	Corrupt.when(!ok, "tensor %q of the header has no dtype", name)
	shape, offsets := integers(name, object["shape"]), integers(name, object["data_offsets"])
	Corrupt.when(len(offsets) != 2, "tensor %q of the header lacks data_offsets", name)
	return headerEntry{dtype, shape, offsets[0], offsets[1]}
}

func integers(name string, member any) (out []uint64) {
	list, ok := member.([]any)
	Corrupt.when(!ok, "tensor %q of the header lacks a list", name)
	for _, v := range list {
		number, _ := v.(json.Number)
		n, err := strconv.ParseUint(string(number), 10, 64)
		Corrupt.when(err != nil, "tensor %q of the header has %v for an integer", name, v)
		out = append(out, n)
	}
	return out
}

// checkPrefix compares the header of a weights file with the directory (7).
func (c *Container) checkPrefix(prefix []byte, f *File, tensors []*Tensor) {
	entries := parsePrefix(prefix)
	checkOffsets(entries, f.Length-uint64(len(prefix)))
	Corrupt.when(len(entries) != len(tensors), "the header of %q has %d tensors, the directory %d",
		c.Text(f.Path), len(entries), len(tensors))
	for _, t := range tensors {
		e, ok := entries[c.Text(t.Name)]
		Corrupt.when(!ok, "the header of %q lacks tensor %q", c.Text(f.Path), c.Text(t.Name))
		c.checkEntry(t, &e, uint64(len(prefix)))
	}
}

// checkOffsets checks that the tensors of a header fill their file.
func checkOffsets(entries map[string]headerEntry, length uint64) {
	all := make([]headerEntry, 0, len(entries))
	for _, e := range entries {
		all = append(all, e)
	}
	sort.Slice(all, func(i, k int) bool {
		a, b := &all[i], &all[k]
		return a.begin < b.begin || (a.begin == b.begin && a.end < b.end)
	})
	at := uint64(0)
	for _, e := range all {
		wrong := e.begin != at || e.end < e.begin
		Corrupt.when(wrong, "a tensor of the header begins at %d and not at %d", e.begin, at)
		at = e.end
	}
	Corrupt.when(at != length, "the tensors of a header end at %d, the file at %d", at, length)
}

// checkEntry compares a tensor of the header with its record.
func (c *Container) checkEntry(t *Tensor, e *headerEntry, prefix uint64) {
	name, same := c.Text(t.Name), uint64(len(e.shape)) == t.DimensionCount
	for i := 0; same && i < len(e.shape); i++ {
		same = e.shape[i] == t.Shape[i]
	}
	Corrupt.when(!same, "the header has another shape of tensor %q", name)
	moved := t.FileOffset < prefix || e.begin != t.FileOffset-prefix
	Corrupt.when(moved, "the header has another place of tensor %q", name)
	if !knownDtype(t.Dtype) {
		Corrupt.when(isDtypeName(e.dtype), "the header has a known dtype of tensor %q", name)
		return
	}
	_, size := t.Measure()
	other := e.dtype != dtypes[t.Dtype].name || e.end-e.begin != size
	Corrupt.when(other, "the header has another dtype or size of tensor %q", name)
}
