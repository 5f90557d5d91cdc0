"""Two tensors compared element by element, in machine code: one pass over the memory of both."""

from __future__ import annotations

from numpy import float64, int64, uint64

from ...kernels.scalar._operations import real64, word64

# Words of a setup. SAME_FORMAT is 1 where equal codes are equal numbers, 2 where they also count ulps.
NUMEL, SHARE, SAME_FORMAT, A, B, ULP = 0, 1, 2, 3, 9, 15
# Of a layout, from A or B on: bits of the mantissa, bias, mask of the magnitude, first code that is no finite number,
# code of infinity (-1 without one), code of the largest number.
MANTISSA, BIAS, MAGNITUDE, SPECIAL, INFINITY, TOP = range(6)
SETUP = ULP + 4  # mantissa bits and lowest exponent of both formats
# What is counted; from A_NAN on first of A, then of B.
SAME, FINITE, A_NAN, A_INFINITE, A_ZEROS, A_TOP, A_VARIES, B_NAN, B_INFINITE, B_ZEROS, B_TOP, B_VARIES = range(12)
COUNTS = 12
# Changes in ulps by binade, from 2^LOWEST on, and by the first FINE bits of their fraction.
FINE, LOWEST, BINADES = 5, -192, 512
# Changes of fewer ulps, where they are whole, are counted by their number.
SMALL = 64
BLOCK = 1024  # with at most 2^52 steps each, their sum is below 2^63


def compare_shares(first, last, a, b, setup, counts, table, small, sums):
    """For the shares [first, last): counts, changes by size, their sum and the largest, each share in a row."""
    for share in range(first, last):
        begin = share * setup[SHARE]
        end = min(begin + setup[SHARE], setup[NUMEL])
        for low in range(begin, end, BLOCK):
            compare_block(low, min(low + BLOCK, end), share, a, b, setup, counts, table, small, sums)


def compare_block(low, high, share, a, b, setup, counts, table, small, sums):
    """Counts that need no branch first, then the elements that changed."""
    mask_a, special_a, top_a = setup[A + MAGNITUDE], setup[A + SPECIAL], setup[A + TOP]
    mask_b, special_b, top_b = setup[B + MAGNITUDE], setup[B + SPECIAL], setup[B + TOP]
    first_a, first_b = int64(a[0]), int64(b[0])
    equal, specials, zeros_a, zeros_b, tops_a, tops_b, varies_a, varies_b = 0, 0, 0, 0, 0, 0, 0, 0
    for i in range(low, high):
        x, y = int64(a[i]), int64(b[i])
        p, q = x & mask_a, y & mask_b
        equal += x == y
        specials += (p >= special_a) | (q >= special_b)
        zeros_a += p == 0
        zeros_b += q == 0
        tops_a += p == top_a
        tops_b += q == top_b
        varies_a |= x ^ first_a
        varies_b |= y ^ first_b
    counts[share, A_ZEROS] += zeros_a
    counts[share, B_ZEROS] += zeros_b
    counts[share, A_TOP] += tops_a
    counts[share, B_TOP] += tops_b
    counts[share, A_VARIES] |= varies_a != 0
    counts[share, B_VARIES] |= varies_b != 0
    if setup[SAME_FORMAT] and specials == 0 and equal == high - low:
        counts[share, SAME] += equal
        counts[share, FINITE] += equal
    else:
        compare_changed(low, high, share, a, b, setup, counts, table, small, sums)


def compare_changed(low, high, share, a, b, setup, counts, table, small, sums):
    """The elements of a block of which some changed, or are NaN or infinite."""
    mask_a, special_a, mantissa_a, bias_a = (
        setup[A + MAGNITUDE],
        setup[A + SPECIAL],
        setup[A + MANTISSA],
        setup[A + BIAS],
    )
    mask_b, special_b, mantissa_b, bias_b = (
        setup[B + MAGNITUDE],
        setup[B + SPECIAL],
        setup[B + MANTISSA],
        setup[B + BIAS],
    )
    digits_1, least_1, digits_2, least_2 = setup[ULP], setup[ULP + 1], setup[ULP + 2], setup[ULP + 3]
    same_format = setup[SAME_FORMAT]
    same, finite, top, sum_of_steps = 0, 0, 0, 0
    still = small[share, 0]
    total, largest = 0.0, sums[share, 1]
    for i in range(low, high):
        x, y = int64(a[i]), int64(b[i])
        p, q = x & mask_a, y & mask_b
        if (p >= special_a) | (q >= special_b):
            same += count_special(x, y, p, q, share, setup, counts)
            continue
        finite += 1
        if same_format == 2 and (x ^ y) >> mantissa_a == 0:
            # In one binade and of one sign codes count ulps; to ask for equal ones first costs more than to count them.
            steps = abs(p - q)
            sum_of_steps += steps
            top = max(top, steps)
            if steps < SMALL:
                small[share, steps] += 1
            else:
                count_change(int64(word64(float64(steps))), 0, share, table)
            continue
        u, v = magnitude(p, mantissa_a, bias_a), magnitude(q, mantissa_b, bias_b)
        u = u if x == p else -u
        v = v if y == q else -v
        if u == v:
            same += 1
            continue
        halved = 0
        change = v - u
        if abs(change) > 1.7976931348623157e308:
            halved, u, v = 1, 0.5 * u, 0.5 * v
            change = v - u
        # What rounding the difference took away (Knuth's two-sum): the binade is that of the exact change.
        back = change - v
        rest = (v - (change - back)) + (-u - back)
        bits = int64(word64(abs(change)))
        if rest != 0.0 and (rest < 0.0) != (change < 0.0):
            bits -= 1
        raised = 0
        if bits >> 52 == 0:
            raised = 54
            bits = int64(word64(real64(uint64(bits)) * 18014398509481984.0))
        binade = (int64(word64(abs(u))) >> 52) - 1023 + halved
        spacing = max(max(binade, least_1) - digits_1, max(binade, least_2) - digits_2)
        power = (bits >> 52) - 1023 - raised + halved - spacing
        count_change(bits, power - ((bits >> 52) - 1023), share, table)
        # The change with its exponent replaced by that of its size in ulps.
        size = real64(uint64((bits & 0xFFFFFFFFFFFFF) | (min(max(power + 1023, 1), 2046) << 52)))
        total += size
        if size > largest:
            largest = size
    counts[share, SAME] += same + small[share, 0] - still
    counts[share, FINITE] += finite
    sums[share, 0] += total + float64(sum_of_steps)
    sums[share, 1] = max(largest, float64(top))


def count_change(bits, moved, share, table):
    """Count a size in ulps: the bits of a float64, to be multiplied by 2^moved."""
    slot = min(max((bits >> 52) - 1023 + moved - LOWEST, 0), BINADES - 1)
    table[share, (slot << FINE) + ((bits >> (52 - FINE)) & ((1 << FINE) - 1))] += 1


def magnitude(code, mantissa, bias):
    """The value of a finite code without its sign."""
    if mantissa == 52:
        return real64(uint64(code))
    power, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
    if power == 0:
        return float64(fraction) * real64(uint64((1024 - bias - mantissa) << 52))
    return real64(uint64(((power - bias + 1023) << 52) | (fraction << (52 - mantissa))))


def count_special(x, y, p, q, share, setup, counts):
    """Count NaN and infinities of two codes; whether both stand for the same."""
    kind_a, kind_b = 0, 0
    if p >= setup[A + SPECIAL]:
        kind_a = 2 if p == setup[A + INFINITY] else 1
        counts[share, A_INFINITE if kind_a == 2 else A_NAN] += 1
    if q >= setup[B + SPECIAL]:
        kind_b = 2 if q == setup[B + INFINITY] else 1
        counts[share, B_INFINITE if kind_b == 2 else B_NAN] += 1
    if kind_a != kind_b:
        return 0
    return 1 if kind_a == 1 else (x == p) == (y == q)
