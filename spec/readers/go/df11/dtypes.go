package df11

const dtypeBF16 = 15

type dtype struct {
	name string
	bits uint64
}

// dtypes is the table of section 5, by id.
var dtypes = [...]dtype{
	1: {"BOOL", 8}, 2: {"F4", 4}, 3: {"F6_E2M3", 6}, 4: {"F6_E3M2", 6},
	5: {"U8", 8}, 6: {"I8", 8}, 7: {"F8_E5M2", 8}, 8: {"F8_E4M3", 8},
	9: {"F8_E8M0", 8}, 10: {"F8_E4M3FNUZ", 8}, 11: {"F8_E5M2FNUZ", 8},
	12: {"I16", 16}, 13: {"U16", 16}, 14: {"F16", 16}, 15: {"BF16", 16},
	16: {"I32", 32}, 17: {"U32", 32}, 18: {"F32", 32}, 19: {"C64", 64},
	20: {"F64", 64}, 21: {"I64", 64}, 22: {"U64", 64},
}

func knownDtype(id uint32) bool {
	return id >= 1 && id < uint32(len(dtypes))
}

func isDtypeName(name string) bool {
	for _, d := range dtypes[1:] {
		if d.name == name {
			return true
		}
	}
	return false
}

// measure sets Elements and Size of a tensor of a known dtype (5). A
// dimension of zero does not undo an overflow of the others.
func (t *Tensor) measure() error {
	product, empty := uint64(1), false
	for _, n := range t.Shape[:t.DimensionCount] {
		if n == 0 {
			empty = true
			continue
		}
		var ok bool
		if product, ok = mul(product, n); !ok {
			return overflow("the number of elements of a tensor")
		}
	}
	bits, ok := mul(product, dtypes[t.Dtype].bits)
	if !ok {
		return overflow("the bits of a tensor")
	}
	if empty {
		return nil
	}
	if bits%8 != 0 {
		return corrupt("tensor %q has %d bits", t.Name, bits)
	}
	t.Elements, t.Size = product, bits/8
	return nil
}
