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
	name, dtype    string
	shape, offsets []uint64
}

// parsePrefix reads the prefix of a weights file, all of it. The tensors are in
// ascending order of their offsets.
func parsePrefix(prefix []byte) (out []headerEntry) {
	size := uint64(len(prefix))
	wrong := size < 8 || binary.LittleEndian.Uint64(prefix) != size-8
	Corrupt.when(wrong, "a prefix of %d bytes does not begin with the length of its header", size)
	for name, member := range header(prefix[8:]) {
		object, ok := member.(map[string]any)
		if name != "__metadata__" {
			dtype, ok := object["dtype"].(string)
			Corrupt.when(!ok, "tensor %q of the header has no dtype", name)
			e := headerEntry{name, dtype, integers(object["shape"]), integers(object["data_offsets"])}
			wrong := len(e.shape) > maxDimensions || len(e.offsets) != 2
			Corrupt.when(wrong, "tensor %q of the header has too many numbers, or too few", name)
			out = append(out, e)
			continue
		}
		for _, v := range object {
			_, isString := v.(string)
			ok = ok && isString
		}
		Corrupt.when(!ok && member != nil, "__metadata__ is no object of strings")
	}
	sort.Slice(out, func(i, k int) bool {
		a, b := out[i].offsets, out[k].offsets
		return a[0] < b[0] || (a[0] == b[0] && a[1] < b[1])
	})
	return out
}

func integers(member any) (out []uint64) {
	list, ok := member.([]any)
	Corrupt.when(!ok, "a tensor of the header lacks a list of integers")
	for _, v := range list {
		number, _ := v.(json.Number)
		n, err := strconv.ParseUint(string(number), 10, 64)
		Corrupt.when(err != nil, "a tensor of the header has %v for an integer", v)
		out = append(out, n)
	}
	return out
}

// checkPrefix compares the header of a weights file with the directory (7).
func (c *Container) checkPrefix(prefix []byte, f *File, tensors []*Tensor) {
	entries, at, size := parsePrefix(prefix), uint64(0), uint64(len(prefix))
	wrong := len(entries) != len(tensors)
	Corrupt.when(wrong, "the header has %d tensors, the directory %d", len(entries), len(tensors))
	byName := map[string]*Tensor{}
	for _, t := range tensors {
		byName[c.Text(t.Name)] = t
	}
	for _, e := range entries {
		wrong := e.offsets[0] != at || e.offsets[1] < at
		Corrupt.when(wrong, "tensor %q of the header is at %d and not at %d", e.name, e.offsets, at)
		at = e.offsets[1]
		t := byName[e.name]
		Corrupt.when(t == nil, "the directory lacks tensor %q of the header", e.name)
		same := e.offsets[0] == t.FileOffset-size && t.DimensionCount == uint64(len(e.shape))
		for i, n := range e.shape {
			same = same && n == t.Shape[i]
		}
		Corrupt.when(!same, "the header has another shape or place of tensor %q", e.name)
		if knownDtype(t.Dtype) {
			_, bytes := t.Measure()
			same = e.dtype == dtypes[t.Dtype].name && at-e.offsets[0] == bytes
		}
		for _, d := range dtypes {
			same = same && (knownDtype(t.Dtype) || e.dtype != d.name)
		}
		Corrupt.when(!same, "the header has another dtype or size of tensor %q", e.name)
	}
	Corrupt.when(at != f.Length-size, "the tensors of a header end at %d and not with the file", at)
}
