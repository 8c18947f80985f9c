// Package df11 reads df11 containers, versions 1.0 and 1.1: it opens, loads, verifies
// and restores them. Numbers in comments are sections of format.md.
package df11

import "math"

// Constants of section 1.
const (
	magic             = "\xDF\x44\x46\x31\x31\x0D\x0A\x1A"
	versionMajor      = 1
	headBytes         = 4096
	headerBytes       = 64
	sectionAlignment  = 4096
	arrayAlignment    = 256
	chunkBytes        = 1048576
	maxDirectoryBytes = 268435456
	maxFileBytes      = math.MaxInt64
	maxNameBytes      = 4096
	maxComponentBytes = 255
	maxPathComponents = 32
	maxFiles          = 10000
	maxFolders        = 10000
	maxAliases        = 15
	maxKeyBytes       = 255
	maxValueBytes     = 65536
	maxMetadataBytes  = 1048576
	maxDimensions     = 8
	maxShards         = 100000
	maxCodeLength     = 16
	none              = math.MaxUint64
)

// Kinds of files (3, File).
const (
	FileWeights = iota
	FileSide
	FileBeside
)

// Kinds of sections (3, Section).
const (
	sectionCodebook = 1 + iota
	sectionIndex
	sectionBitstream
	sectionPlane
	sectionRaw
	sectionPrefix
	sectionSide
	sectionIgnored = 1 << 31 // kinds from here on are ignored if unknown
)

func knownSection(kind uint32) bool {
	return kind >= sectionCodebook && kind <= sectionSide
}

// Encodings (6).
const (
	encodingAlias = iota
	encodingRaw
	encodingGap
	encodingTile
	encodingFloat
	encodingDelta
)

const dtypeBF16 = 15

// exponentBits and zeroBits are the table of 6.5, by dtype.
var (
	exponentBits = map[uint32]uint64{7: 5, 8: 4, 14: 5, dtypeBF16: 8, 18: 8}
	zeroBits     = map[uint32][]uint64{7: {0}, 8: {0}, 14: {0}, dtypeBF16: {4}, 18: {0, 13, 16}}
)

func allowsZeroBits(dtype uint32, bits uint64) bool {
	for _, allowed := range zeroBits[dtype] {
		if bits == allowed {
			return true
		}
	}
	return false
}

// dtypes is the table of section 5, by id; any other has neither name nor bits.
var dtypes = map[uint32]struct {
	name string
	bits uint64
}{
	1: {"BOOL", 8}, 2: {"F4", 4}, 3: {"F6_E2M3", 6}, 4: {"F6_E3M2", 6},
	5: {"U8", 8}, 6: {"I8", 8}, 7: {"F8_E5M2", 8}, 8: {"F8_E4M3", 8},
	9: {"F8_E8M0", 8}, 10: {"F8_E4M3FNUZ", 8}, 11: {"F8_E5M2FNUZ", 8},
	12: {"I16", 16}, 13: {"U16", 16}, 14: {"F16", 16}, 15: {"BF16", 16},
	16: {"I32", 32}, 17: {"U32", 32}, 18: {"F32", 32}, 19: {"C64", 64},
	20: {"F64", 64}, 21: {"I64", 64}, 22: {"U64", 64},
}

func knownDtype(id uint32) bool { return dtypes[id].bits > 0 }
