package df11

import (
	"encoding/binary"
	"strings"
	"testing"
)

func prefixOf(header string) []byte {
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
}

const entry = `{"dtype":"U8","shape":[3],"data_offsets":[0,3]}`

func TestHeaders(t *testing.T) {
	deep := func(n int) string {
		return `{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":` +
			strings.Repeat("[", n) + strings.Repeat("]", n) + `}}`
	}
	good := []string{
		`{}`, " \t\r\n{ } \n", `{"__metadata__":null}`, `{"__metadata__":{"a":"\u0000"}}`,
		`{"a":` + entry + `}`, `{"\ud83d\ude00":` + entry + `}`,
		`{"a":{"x":[1e99,-0,null,true,{"y":{}}],"dtype":"U8","shape":[],"data_offsets":[0,1]}}`,
		deep(98),
	}
	for _, h := range good {
		if _, err := parsePrefix(prefixOf(h)); err != nil {
			t.Errorf("%.80s: %v", h, err)
		}
	}
	bad := []string{
		``, `[]`, `{} {}`, `{"a":` + entry + `,}`, `{"a":` + entry + `,"\u0061":` + entry + `}`,
		`{"a":[]}`, `{"__metadata__":{"a":1}}`, `{"__metadata__":[]}`, "{}\x00", "\ufeff{}",
		`{"\ud83d":` + entry + `}`, `{"\ude00\ud83d":` + entry + `}`, `{"\ud83d\n":` + entry + `}`,
		`{"a":{"x":01,"dtype":"U8","shape":[],"data_offsets":[0,1]}}`,
		`{"a":{"x":+1,"dtype":"U8","shape":[],"data_offsets":[0,1]}}`,
		`{"a":{"x":1.,"dtype":"U8","shape":[],"data_offsets":[0,1]}}`,
		`{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,1]}}`,
		`{"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,1]}}`,
		`{"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}`,
		`{"a":{"dtype":"U8","shape":[1]}}`, "{\"\xff\":" + entry + "}", `{"a`, `{"a\`, `{"a\u00`,
		deep(100000),
	}
	for _, h := range bad {
		if _, err := parsePrefix(prefixOf(h)); KindOf(err) != Corrupt {
			t.Errorf("%.80s: %v", h, err)
		}
	}
}

// A header cut anywhere, or with another byte anywhere, never panics.
func TestHeaderBytes(t *testing.T) {
	h := ` {"a\u00e4\ud83d\ude00": {"dtype": "U8", "x": [1.5e-3, {}], ` +
		`"shape": [], "data_offsets": [0, 1]}} `
	for i := range h {
		_, _ = parsePrefix(prefixOf(h[:i]))
		for c := 0; c < 256; c++ {
			_, _ = parsePrefix(prefixOf(h[:i] + string([]byte{byte(c)}) + h[i+1:]))
		}
	}
}
