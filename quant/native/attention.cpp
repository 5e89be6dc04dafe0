// Attention of a few rows over a paged cache: split along the past (Flash-Decoding, Dao et al., 2023), all query heads of
// a KV head together, so that a key is read once for all of them.
//
// A row's result depends on its own query and past alone: scores, weights and sums of a query have registers of their own,
// and are added up in the order of positions, MOEDGE_SPLIT at a time.
#include "attention_float.h"
#include "attention_softmax.h"
#if MOEDGE_LEVEL >= 3
#include "attention_packed.h"
#endif
#if MOEDGE_LEVEL >= 4
#include "attention_tiles.h"
#endif

namespace {

// The exponent of a sum of nothing; finite, so that differences are not NaN.
constexpr float NOTHING = -1e30f;

// Elements `index` to `index + count` of a tensor as floats.
void read(const void *data, int64_t index, int count, int format, float *out) {
    if (format == MOEDGE_FP32) {
        memcpy(out, (const float *)data + index, count * sizeof(float));
        return;
    }
    const uint16_t *x = (const uint16_t *)data + index;
    int i = 0;
    for (; i + W <= count; i += W) store(out + i, format == MOEDGE_BF16 ? from_bf16(x + i) : from_half(x + i));
    for (; i < count; i++) out[i] = format == MOEDGE_BF16 ? bf16_to_float(x[i]) : half_to_float(x[i]);
}

void write(const float *x, int count, int format, void *data, int64_t index) {
    uint16_t *out = (uint16_t *)data + index;
    if (format == MOEDGE_FP32) memcpy((float *)data + index, x, count * sizeof(float));
    else if (format == MOEDGE_BF16) {
        int i = 0;
        for (; i + W <= count; i += W) to_bf16(load(x + i), out + i);
        for (; i < count; i++) out[i] = float_to_bf16(x[i]);
    } else
        for (int i = 0; i < count; i++) out[i] = float_to_half(x[i]);
}

// Multiplies x [width], a power of two, with Sylvester's orthonormal Hadamard matrix (fast Walsh-Hadamard transform).
void rotate(float *x, int width) {
    float scale = 1;
    for (int half = 1; half < width; half *= 2) {
        scale *= 0.70710678f;
        for (int i = 0; i < width; i += 2 * half)
            for (int j = i; j < i + half; j++) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
    }
    for (int i = 0; i < width; i++) x[i] *= scale;
}

bool packs(const moedge_attention &a, const moedge_vectors &v) {
    return MOEDGE_LEVEL >= 3 && !a.exact && v.format != MOEDGE_FP32 && v.format != MOEDGE_FP16;
}

bool in_tiles(const moedge_attention &a, const moedge_vectors &v) {
    return MOEDGE_LEVEL >= 4 && packs(a, v) && v.format != MOEDGE_BF16;
}

// Reads the queries and packs them for the products of each part of the keys.
void prepare(const Work &w) {
    const moedge_attention &a = w.a;
    const int64_t width = query_width(a);
    int64_t begin = 0;
    uint8_t *packed = w.queries;
    [[maybe_unused]] float *numbers = w.factors;
    for (int part = 0; part < a.num_parts; part++) {
        const moedge_vectors &v = a.keys[part];
        const int64_t stride = padded_width(v);
        for (int n = 0; n < w.num; n++) {
            float *q = w.wide + n * stride;
            read(a.queries, head_index(w, n) * width + begin, v.width, a.query_format, q);
            if (a.rotated && part == 0) rotate(q, v.width);
        }
#if MOEDGE_LEVEL >= 3
        if (packs(a, v)) {
            if (v.format == MOEDGE_BF16) pack_bf16(w.wide, v.width, stride, w.num, packed);
#if MOEDGE_LEVEL >= 4
            else pack_tiles(v, w.wide, stride, w.num, packed, numbers);
#else
            else pack_bytes(v, w.wide, stride, w.num, packed, numbers);
#endif
        } else
#endif
            pack_float(w.wide, v.width, int(stride), w.num, (float *)packed);
        packed += padded_queries(w.num) * stride * 4;
        numbers += padded_queries(w.num) * numbers_of(v);
        begin += v.width;
    }
}

void widen_halves(const uint16_t *halves, int count, float *out) {
    int i = 0;
    for (; i + W <= count; i += W) store(out + i, from_half(halves + i));
    for (; i < count; i++) out[i] = half_to_float(halves[i]);
}

// Calls use(token, address, how many) for the runs of tokens of a split that lie beside each other in the cache.
template <class Use>
void each_run(const moedge_attention &a, const moedge_rows &rows, int head, int nbytes, const uint8_t *codes, int64_t begin,
              Visible seen, Use use) {
    const int32_t *table = a.tables + rows.table * a.table_width;
    for (int t = seen.from, count; t < seen.to; t += count) {
        const int64_t position = begin + t, offset = position % a.block;
        const int64_t index = int64_t(table[position / a.block]) * a.kv_heads + head;
        count = int(a.block - offset < seen.to - t ? a.block - offset : seen.to - t);
        use(t, codes + (index * a.block + offset) * nbytes, count, index, offset);
    }
}

// The addresses of vectors `from` to `to` of a split, and their scales and zeros; positions that no row attends to are
// zeros, not the bytes in the cache: a slot's last owner may have left NaN, and 0 * NaN is NaN.
void locate(const Work &w, const moedge_vectors &v, int64_t begin, Visible seen, int from, int to, const uint8_t **rows,
            float *scales, float *zeros) {
    const moedge_attention &a = w.a;
    const int groups = groups_of(v), nbytes = row_nbytes(v);
    const auto hide = [&](int t) {
        rows[t] = w.zero;
        for (int g = 0; g < groups; g++) scales[g * SPLIT + t] = zeros[g * SPLIT + t] = 0;
    };
    for (int t = from; t < seen.from; t++) hide(t);
    for (int t = seen.to; t < to; t++) hide(t);
    each_run(a, *w.tile_rows, w.head, nbytes, v.codes, begin, seen,
             [&](int t, const uint8_t *first, int count, int64_t index, int64_t offset) {
                 for (int i = 0; i < count; i++) rows[t + i] = first + int64_t(i) * nbytes;
                 for (int g = 0; g < groups; g++) {
                     const int64_t at = (index * groups + g) * a.block + offset;
                     widen_halves(v.scales + at, count, scales + g * SPLIT + t);
                     if (v.zeros) widen_halves(v.zeros + at, count, zeros + g * SPLIT + t);
                 }
             });
}

void score(const Work &w, int64_t begin, Visible seen, int from, int to, Ahead &ahead) {
    const moedge_attention &a = w.a;
    const uint8_t *packed = w.queries;
    [[maybe_unused]] const float *numbers = w.factors;
    for (int part = 0; part < a.num_parts; part++) {
        const moedge_vectors &v = a.keys[part];
        locate(w, v, begin, seen, from, to, w.rows, w.scales, w.zeros);
#if MOEDGE_LEVEL >= 3
#if MOEDGE_LEVEL >= 4
        if (in_tiles(a, v)) score_tiles(w, part, from, to, packed, numbers, ahead);
        else
#endif
            if (packs(a, v)) score_packed(w, part, from, to, packed, numbers, ahead);
        else
#endif
            score_float(w, part, from, to, (const float *)packed, part > 0, ahead);
        packed += padded_queries(w.num) * padded_width(v) * 4;
        numbers += padded_queries(w.num) * numbers_of(v);
    }
}

// Adds up the weighted values of a split: for every query [Q] its sums [width], their exponent and the sum of weights.
void weigh(const Work &w, int64_t split, int from, int to, Ahead &ahead, float *out) {
    const moedge_attention &a = w.a;
    const moedge_vectors &v = a.values;
    const int groups = groups_of(v) == 2 ? 2 : 1, part = v.width / groups;
    const int64_t stride = padded_width(v);
    const bool packed = packs(a, v);
#if MOEDGE_LEVEL >= 3
    if (packed && v.format == MOEDGE_INT8) split_scales(w, from, to);
#endif
    if (in_tiles(a, v)) ahead.spread(w.num * (to - from) / 16, SOFTMAX_READS);
    for (int n = 0; n < w.num; n++) {
        const Visible visible(a, w.tile_rows->position + n / a.group, split);
        float *ends = out + n * (v.width + 2) + v.width, *p = w.scores + int64_t(n) * SPLIT;
        ends[0] = NOTHING;
        ends[1] = 0;
#if MOEDGE_LEVEL >= 3
        if (packed) {
            weigh_packed(w, n, visible, from, to, ends, ends + 1, ahead);
            continue;
        }
#endif
        if (visible.any()) ends[1] = softmax(w, n, visible, from, to, ends);
        else memset(p + from, 0, (to - from) * sizeof(float));
        memcpy((float *)w.weights + int64_t(n) * SPLIT + from, p + from, (to - from) * sizeof(float));
    }
#if MOEDGE_LEVEL >= 3
    if (packed && v.format == MOEDGE_BF16) sum_bf16(w, from, to, ahead);
#if MOEDGE_LEVEL >= 4
    else if (in_tiles(a, v)) sum_tiles(w, from, to, ahead);
#else
    else if (packed) sum_bytes(w, from, to, ahead);
#endif
#endif
    if (!packed) sum_float(w, from, to, ahead);
    // int4 pads each of its groups, where sums come from packed codes.
    const int64_t apart = packed ? stride / groups : part;
    for (int n = 0; n < w.num; n++)
        for (int g = 0; g < groups; g++) {
            const float *from_sums = w.sums + n * stride + g * apart;
            const float added = packed && groups == 2 ? w.shares[4 * n + 2 + g] : 0;
            float *to_out = out + n * (v.width + 2) + g * part;
            for (int d = 0; d < part; d++) to_out[d] = from_sums[d] + added;
        }
}

// Positions of a split that any of the rows attends to: the first row to the first of them, the last row to the last.
Visible seen_by(const moedge_attention &a, const moedge_rows &rows, int64_t split) {
    Visible seen(a, rows.position + rows.count - 1, split);
    const Visible first(a, rows.position, split);
    if (first.any() && first.from < seen.from) seen.from = first.from;
    return seen;
}

// What is computed after a split: its keys are read into the cache meanwhile.
struct Next {
    const moedge_rows *rows;
    int head;
    int64_t split;
};

// Reads scales and zeros of `count` tokens of a block into the cache.
void read_factors(const moedge_attention &a, const moedge_vectors &v, int64_t index, int64_t offset, int count) {
    const int groups = groups_of(v), line = 64 / sizeof(uint16_t);
    for (int g = 0; g < groups; g++)
        for (int i = 0; i < count; i += line) {
            const int64_t at = (index * groups + g) * a.block + offset + i;
            _mm_prefetch((const char *)(v.scales + at), _MM_HINT_T0);
            if (v.zeros) _mm_prefetch((const char *)(v.zeros + at), _MM_HINT_T0);
        }
}

// Adds a split's keys or values to what is read ahead.
void add_runs(const Work &w, const moedge_vectors &v, const moedge_rows &rows, int head, int64_t split, Ahead &ahead) {
    const int nbytes = row_nbytes(v);
    each_run(w.a, rows, head, nbytes, v.codes, split * SPLIT, seen_by(w.a, rows, split),
             [&](int, const uint8_t *first, int count, int64_t, int64_t) { ahead.add(first, int64_t(count) * nbytes); });
}

// Sums of one split for all queries of a row tile and KV head: [Q, width + 2].
void attend_split(const Work &w, int64_t split, const Next &next, float *out) {
    const moedge_attention &a = w.a;
    const Visible seen = seen_by(a, *w.tile_rows, split);
    const int from = seen.from / TILE * TILE, to = int(padded(seen.to, TILE));
    locate(w, a.values, split * SPLIT, seen, from, to, w.value_rows, w.value_scales, w.value_zeros);
    const bool tiles = in_tiles(a, a.keys[0]) && in_tiles(a, a.values);
    Ahead ahead(w.ahead);
    const auto read_next = [&] {
        if (!next.rows) return;
        add_runs(w, a.keys[0], *next.rows, next.head, next.split, ahead);
        if (tiles) add_runs(w, a.values, *next.rows, next.head, next.split, ahead);
        each_run(a, *next.rows, next.head, 0, a.values.codes, next.split * SPLIT, seen_by(a, *next.rows, next.split),
                 [&](int, const uint8_t *, int count, int64_t index, int64_t offset) {
                     read_factors(a, a.keys[0], index, offset, count);
                     read_factors(a, a.values, index, offset, count);
                 });
    };
    // Where products take less time than memory, it is read evenly all the time, and a whole split ahead.
    if (tiles) read_next();
    else add_runs(w, a.values, *w.tile_rows, w.head, split, ahead);
    ahead.list();
    score(w, split * SPLIT, seen, from, to, ahead);
    if (!tiles) {
        ahead = Ahead(w.ahead);
        read_next();
        ahead.list();
    }
    weigh(w, split, from, to, ahead, out);
}

// Adds the result of a later split, for rows that attend to it; `begun` are rows that have attended to one before.
void add_split(const Work &w, int64_t split, const float *partial) {
    const int width = w.a.values.width;
    for (int n = 0; n < w.num; n++) {
        const int position = w.tile_rows->position + n / w.a.group;
        if (!Visible(w.a, position, split).any()) continue;
        float *total = w.total + n * (width + 2);
        const float *added = partial + n * (width + 2);
        if (first_visible(w.a, position) / SPLIT == split) {
            memcpy(total, added, (width + 2) * sizeof(float));
            continue;
        }
        const float top = total[width] > added[width] ? total[width] : added[width];
        const float before = exp2(total[width] - top), after = exp2(added[width] - top);
        for (int d = 0; d < width; d++) total[d] = total[d] * before + added[d] * after;
        total[width] = top;
        total[width + 1] = total[width + 1] * before + added[width + 1] * after;
    }
}

void finish(const Work &w) {
    const moedge_attention &a = w.a;
    const int width = a.values.width;
    for (int n = 0; n < w.num; n++) {
        float *total = w.total + n * (width + 2);
        float weights = total[width + 1];
        if (a.sinks) {
            // A sink may be far above all scores: the sum of weights is then infinite, and the result zero.
            const float above = a.sinks[w.head * a.group + n % a.group] * LOG2E - total[width];
            weights += above < 127 ? exp2(above) : __builtin_inff();
        }
        for (int d = 0; d < width; d++) total[d] /= weights;
        write(total, width, a.out_format, a.out, head_index(w, n) * width);
    }
}

void take(Work &w, int64_t tile, int head) {
    w.tile_rows = w.a.rows + tile;
    w.head = head;
    w.num = w.tile_rows->count * w.a.group;
}

int64_t first_split(const moedge_attention &a, const moedge_rows &rows) { return first_visible(a, rows.position) / SPLIT; }

int64_t last_split(const moedge_rows &rows) { return (rows.position + rows.count - 1) / SPLIT; }

// The first piece of a row tile or a later one.
int64_t first_piece(const moedge_attention &a, int64_t tile) {
    int64_t low = 0, high = a.num_pieces;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (a.pieces[2 * middle] < tile) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The first split of an item; nothing behind the last item.
Next first_of(const moedge_attention &a, int64_t item, int64_t end) {
    if (item >= end) return {nullptr, 0, 0};
    const int64_t index = item / a.kv_heads;
    const moedge_rows *rows = a.rows + (a.num_pieces ? a.pieces[2 * index] : index);
    return {rows, int(item % a.kv_heads), a.num_pieces ? a.pieces[2 * index + 1] : first_split(a, *rows)};
}

}  // namespace

extern "C" void MOEDGE_NAMED(moedge_attend)(const moedge_attention *a, int64_t begin, int64_t end, void *scratch) {
    Work w(*a, scratch);
#if MOEDGE_LEVEL >= 4
    const Tiles tiles;
#endif
    for (int64_t item = begin; item < end; item++) {
        const Next current = first_of(*a, item, end), next = first_of(*a, item + 1, end);
        take(w, current.rows - a->rows, current.head);
        prepare(w);
        if (a->num_pieces) {
            attend_split(w, current.split, next, a->partials + item * a->partial_stride);
            continue;
        }
        const int64_t last = last_split(*w.tile_rows);
        for (int64_t split = current.split; split <= last; split++) {
            attend_split(w, split, split < last ? Next{current.rows, current.head, split + 1} : next, w.partial);
            add_split(w, split, w.partial);
        }
        finish(w);
    }
}

extern "C" void MOEDGE_NAMED(moedge_attend_reduce)(const moedge_attention *a, int64_t begin, int64_t end, void *scratch) {
    Work w(*a, scratch);
    for (int64_t item = begin; item < end; item++) {
        const int64_t tile = item / a->kv_heads, head = item % a->kv_heads;
        take(w, tile, int(head));
        for (int64_t piece = first_piece(*a, tile); piece < a->num_pieces && a->pieces[2 * piece] == tile; piece++)
            add_split(w, a->pieces[2 * piece + 1], a->partials + (piece * a->kv_heads + head) * a->partial_stride);
        finish(w);
    }
}
