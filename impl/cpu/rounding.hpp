// Rounds values to codes: finds the extent of a block, its scale, and the code of each element, one in a byte.
//
// The arithmetic is that of codec.cuh, here without a branch for each element, so that compilers vectorise it.  The
// codes of a group of elements are first computed from products with the scale's reciprocal.  If one of these codes
// might differ from the code of the exact quotient, all elements of the group are divided instead.
#pragma once

#include "job.hpp"

#include <type_traits>

namespace {

constexpr i64 kGroup = 256;  // elements of a group, for which products or quotients are used

// ---- extent and scale --------------------------------------------------------------------------

// Returns the extent of a block (`Extent` of codec.cuh).  Without an offset, this is the largest magnitude.  Elements
// are then compared as integers without the sign bit, which are ordered like magnitudes, so bf16 need not be widened.
template <class T, bool ASYMMETRIC>
Extent extent(const typename T::Word* __restrict values, i64 count) {
    using Word = typename T::Word;
    if constexpr (ASYMMETRIC) {
        u32 high = 0, low = 0;
        for (i64 i = 0; i < count; ++i) {
            const u32 key = ordered(bits_of(T::widen(values[i])));
            high = key > high ? key : high;
            low = ~key > low ? ~key : low;
        }
        return {high, low};
    } else {
        constexpr Word magnitude = Word(Word(~Word(0)) >> 1);
        Word most = 0;
        for (i64 i = 0; i < count; ++i) {
            const Word word = values[i] & magnitude;
            most = word > most ? word : most;
        }
        return {bits_of(T::widen(most)) & kAbs, 0};
    }
}

template <class T>
Extent extent(const Code& code, const typename T::Word* values, i64 count) {
    if constexpr (std::is_same_v<T, Fp32>) {
        if (code.kind == kAsymmetric) return extent<T, true>(values, count);
    }
    return extent<T, false>(values, count);
}

inline Stored stored_of(const Code& code, Extent extent) {
    if (code.kind == kFloats) return stored_of(code.floats(), extent);
    return stored_of(code.integers(code.kind == kAsymmetric), extent);
}

// ---- one quotient ------------------------------------------------------------------------------

// Rounds elements of a block to codes.  The members are the same for all elements of the block, so they are computed
// once, before the loop over the elements.
template <Kind KIND>
struct Rule {
    Scheme<0> integers;
    Divider divider;

    Rule(const Code& code, Stored stored)
        : integers(code.integers(KIND == kAsymmetric)), divider(divider_of(integers, stored)) {}

    u32 mask() const { return (1u << integers.bits()) - 1u; }
    Scheme<0> known() const { return {integers.stated, KIND == kAsymmetric, KIND == kClipped}; }  // constant in the loop
    float numerator(float value) const { return numerator_of(known(), divider, value); }

    // Returns a bit pattern whose low bits are the code of `quotient`.  The pattern is clamped to the patterns of the
    // first and the last code where a quotient may be out of range:
    //   Symmetric codes: only if they are clipped or rounded stochastically.  Otherwise no quotient of a finite block
    //   exceeds the range by more than its rounding.
    //   Codes with an offset: only from above, unless they are rounded stochastically.  Quotients are not negative, but
    //   may be huge.  The scale is the difference of two rounded quotients; if these are equal, the scale becomes the
    //   smallest normal number.
    // The patterns can be compared as integers, since the patterns of positive floats are ordered as the floats are.
    template <bool STOCHASTIC>
    u32 pattern(float quotient, float shift) const {
        const u32 most = bits_of(kRound + known().last()), least = bits_of(kRound + known().first());
        u32 bits = bits_of((STOCHASTIC ? quotient + shift : quotient) + kRound);
        if (STOCHASTIC || KIND == kAsymmetric || KIND == kClipped) bits = bits > most ? most : bits;
        if (STOCHASTIC) bits = bits < least ? least : bits;
        return bits;
    }
};

// `pattern_of` of codec.cuh, with the scheme's branches taken out of the loop.
template <>
struct Rule<kFloats> {
    Divider divider;
    u32 bits, mantissa, least, top;  // least: exponent of the smallest normal element, with fp32's bias

    Rule(const Code& code, Stored stored)
        : divider(divider_of(code.floats(), stored)), bits(u32(code.bits)), mantissa(u32(code.mantissa)),
          least(u32(127 + code.floats().smallest())), top(code.floats().top()) {}

    u32 mask() const { return (1u << bits) - 1u; }
    float numerator(float value) const { return value; }

    template <bool STOCHASTIC>
    u32 pattern(float quotient, float shift) const {
        const u32 word = bits_of(quotient);
        u32 exponent = word >> 23 & 0xffu;
        exponent = exponent < least ? least : exponent;
        float steps = quotient * float_of((254u + mantissa - exponent) << 23);
        if (STOCHASTIC) steps += shift;
        const int whole = int(bits_of(steps + kRound) - bits_of(kRound));
        u32 size = ((exponent - least) << mantissa) + u32(whole < 0 ? -whole : whole);
        size = size > top ? top : size;
        return size | word >> 31 << (bits - 1);
    }
};

// ---- a product that decides alone ----------------------------------------------------------------

// Whether 2^(bits - 1) - 1, the largest code of `bits` bits, and `mantissa` have a common factor.
inline bool shares_factor(i64 bits, u32 mantissa) {
    const bool threes = mantissa % 3 == 0;
    switch (bits) {
        case 2: return false;
        case 3: return threes;
        case 4: return mantissa % 7 == 0;
        case 5: return threes || mantissa % 5 == 0;
        case 6: return mantissa % 31 == 0;
        case 7: return threes || mantissa % 7 == 0;
        default: return mantissa % 127 == 0;
    }
}

// Returns a factor such that element x factor rounds to the same code as element / scale; 0 if no factor is known.
//
// If the scale is a power of two, the factor is its reciprocal.  Symmetric codes of bf16 have a factor too.  Let A be
// the block's largest magnitude, with mantissa a, and x an element; both mantissas have 8 bits.  Let m be the largest
// code; then the quotient is m x / A.  The quotient either is a tie k + 1/2, or differs from every tie by at least
// 1 / (2 m 2^8) > 2^-16 of its value, because 2 m x - (2 k + 1) A is an integer times a power of two.  The errors of
// scale, product and factor are smaller than this difference.  If m and a have no common factor, the only tie is
// x = A / 2, since m must divide 2 k + 1.  The function tries whether the quotient of this tie rounds up or down, and
// moves the reciprocal by 2^-20 in that direction.
template <class T, Kind KIND>
float lone_factor(const Code& code, Divider divider) {
    constexpr u32 fraction = 0x7fffffu;
    const float scale = divider.divisor;
    if ((bits_of(scale) & fraction) == 0) return divider.reciprocal;
    if constexpr (KIND == kSymmetric && std::is_same_v<T, Bf16>) {
        const float last = code.integers(false).last();
        const u32 largest = (bits_of(scale * last) + 0x8000u) & ~0xffffu;  // A again: 7 bits after the point
        if (shares_factor(code.bits, ((largest & fraction) | (fraction + 1)) >> 16)) return 0.0f;
        const bool up = (float_of(largest) * 0.5f / scale + kRound) - kRound > last * 0.5f;
        return divider.reciprocal * (up ? 1.0f + 0x1p-20f : 1.0f - 0x1p-20f);
    }
    return 0.0f;
}

// ---- many values -------------------------------------------------------------------------------

// Prefetches memory, which may lie beyond the row's end.
template <class Word>
void fetch(const Word* values, i64 count) {
    const auto* bytes = reinterpret_cast<const char*>(values);
    for (i64 at = 0; at < count * i64(sizeof(Word)); at += 64) __builtin_prefetch(bytes + at);
}

// How the quotient element / scale is found:
//   kLone: by one product with a factor, which is known to round to the right code (lone_factor).
//   kBracketed: by two products, one at most and one at least as large as the quotient.
//   kDivided: by a division.
enum Way { kLone, kBracketed, kDivided };

// Writes the codes of `count` values that share a scale.  Returns 0 if all codes equal those of a division.  Otherwise
// (only with kBracketed) the two products of some value round to different codes, and its code may be wrong.
template <class T, Kind KIND, bool STOCHASTIC, Way WAY>
inline __attribute__((always_inline)) u32 round_each(
    const Rule<KIND> rule, float factor, const typename T::Word* __restrict values, const u16* __restrict random,
    u8* __restrict codes, i64 count) {
    const Bracket bracket = bracket_of(rule.divider);
    const u8 mask = u8(rule.mask());
    u32 doubt = 0;
    const auto pattern = [&](float value, float shift) __attribute__((always_inline)) {
        const float numerator = rule.numerator(value);
        if (WAY == kDivided) return rule.template pattern<STOCHASTIC>(numerator / rule.divider.divisor, shift);
        if (WAY == kLone) return rule.template pattern<STOCHASTIC>(numerator * factor, shift);
        const u32 low = rule.template pattern<STOCHASTIC>(numerator * bracket.low, shift);
        doubt |= low ^ rule.template pattern<STOCHASTIC>(numerator * bracket.high, shift);
        return low;
    };
    i64 first = 0;
    if constexpr (std::is_same_v<T, Bf16> && !STOCHASTIC && WAY != kDivided) {
        // Two elements in one word, whose halves become fp32 without shuffles.
        for (i64 i = 0; i < count / 2; ++i) {
            u32 both;
            std::memcpy(&both, values + 2 * i, 4);
            const u32 even = pattern(float_of(both << 16), 0.0f), odd = pattern(float_of(both & 0xffff0000u), 0.0f);
            const u16 pair = u16(u16((even & 0xffu) | odd << 8) & u16(mask | mask << 8));
            std::memcpy(codes + 2 * i, &pair, 2);
        }
        first = count / 2 * 2;
    }
    for (i64 i = first; i < count; ++i) {
        codes[i] = u8(pattern(T::widen(values[i]), STOCHASTIC ? shift_of(random[i]) : 0.0f)) & mask;
    }
    return doubt;
}

template <class T, Kind KIND, bool STOCHASTIC>
__attribute__((noinline)) void divide_each(
    const Rule<KIND>& rule, const typename T::Word* values, const u16* random, u8* codes, i64 count) {
    round_each<T, KIND, STOCHASTIC, kDivided>(rule, 0.0f, values, random, codes, count);
}

// round_values for one kind of codes.
template <class T, Kind KIND, bool STOCHASTIC>
__attribute__((noinline)) void round_kind(
    const Code& code, Stored stored, const typename T::Word* values, const u16* random, i64 ahead, u8* codes,
    i64 count) {
    const Rule<KIND> rule(code, stored);
    const float factor = lone_factor<T, KIND>(code, rule.divider);
    for (i64 at = 0; at < count; at += kGroup) {
        const i64 group = smaller(kGroup, count - at);
        if (ahead != 0) fetch(values + at + ahead, group);
        if (factor != 0.0f) {
            round_each<T, KIND, STOCHASTIC, kLone>(rule, factor, values + at, random + at, codes + at, group);
        } else if (round_each<T, KIND, STOCHASTIC, kBracketed>(
                       rule, 0.0f, values + at, random + at, codes + at, group) != 0) {
            divide_each<T, KIND, STOCHASTIC>(rule, values + at, random + at, codes + at, group);
        }
    }
}

// Writes the codes of `count` values of one block, one code in a byte.  For stochastic rounding, `random` has 16 random
// bits for each value.  If `ahead` is not 0, the elements that lie `ahead` elements further on are prefetched, since
// memory would be idle while a block that is in the cache is rounded.  bf16 values occur only with symmetric integers
// that are rounded to nearest.
template <class T>
__attribute__((noinline)) void round_values(
    const Code& code, Stored stored, const typename T::Word* values, const u16* random, i64 ahead, u8* codes,
    i64 count) {
    if (stored.broken()) {
        std::memset(codes, 0, std::size_t(count));
        return;
    }
    const auto with = [&](auto kind, auto stochastic) {
        round_kind<T, decltype(kind)::value, decltype(stochastic)::value>(
            code, stored, values, random, ahead, codes, count);
    };
    using std::integral_constant;
    const auto chosen = [&](auto kind) {
        return code.stochastic ? with(kind, std::true_type{}) : with(kind, std::false_type{});
    };
    if (code.clipped) return with(integral_constant<Kind, kClipped>{}, std::false_type{});
    if constexpr (!std::is_same_v<T, Fp32>) return with(integral_constant<Kind, kSymmetric>{}, std::false_type{});
    else if (code.kind == kFloats) return chosen(integral_constant<Kind, kFloats>{});
    else if (code.kind == kAsymmetric) return chosen(integral_constant<Kind, kAsymmetric>{});
    else return chosen(integral_constant<Kind, kSymmetric>{});
}

}  // namespace
