package df11

import (
	"encoding/binary"
	"testing"
)

// What no vector has: members that are missing, and one offset.
func TestEntries(t *testing.T) {
	for _, entry := range []string{
		`"shape":[1],"data_offsets":[0,1]`, `"dtype":"U8","data_offsets":[0,1]`,
		`"dtype":"U8","shape":[1]`, `"dtype":"U8","shape":[1],"data_offsets":[0]`,
	} {
		h := `{"a":{` + entry + `}}`
		b := append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h...)
		if _, err := parsePrefix(b); KindOf(err) != Corrupt {
			t.Errorf("%s: %v", h, err)
		}
	}
}
