// Calls the kernels without Python and torch, for sanitizers: random shapes against sums in double, in memory of exactly
// the size that the interface asks for; one thread against several, rows that are split against rows that are whole,
// and tiles of AMX against registers.
//
//     driver CASES [SEED]     exits with 1 and names the first case that is wrong
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "moedge_cpu.h"

namespace {

using Random = std::mt19937;

int among(Random &random, std::vector<int> choices) { return choices[random() % choices.size()]; }

float normal(Random &random) { return std::normal_distribution<float>()(random); }

uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return uint16_t(bits >> 16);
}

float from_bf16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// float16 of about the size of x; subnormal numbers are zero.
uint16_t to_half(float x) {
    int exponent;
    const float fraction = frexpf(fabsf(x), &exponent);
    if (x == 0 || exponent < -13) return 0;
    return uint16_t((x < 0 ? 0x8000 : 0) | (exponent + 14) << 10 | (int(fraction * 2048) & 1023));
}

double from_half(uint16_t x) {
    if (!(x & 0x7fff)) return 0;
    const double magnitude = ldexp(1024 + (x & 1023), (x >> 10 & 31) - 25);
    return x & 0x8000 ? -magnitude : magnitude;
}

// One side of the cache: planes of exactly the size that they need.
struct Side {
    moedge_vectors vectors{};
    std::vector<uint8_t> codes;
    std::vector<uint16_t> scales, zeros;
    int heads, block, groups;

    Side(Random &random, int format, int width, int blocks, int heads_, int block_) : heads(heads_), block(block_) {
        const int sizes[] = {4 * width, 2 * width, 2 * width, width, width / 2};
        groups = format == MOEDGE_INT4 ? 2 : format == MOEDGE_INT8;
        const int64_t vectors_count = int64_t(blocks) * heads * block;
        codes.resize(vectors_count * sizes[format]);
        for (int64_t i = 0; i < vectors_count * width; i++) {
            const float x = normal(random);
            const uint16_t two = format == MOEDGE_BF16 ? to_bf16(x) : to_half(x);
            if (format == MOEDGE_FP32) memcpy(&codes[4 * i], &x, 4);
            else if (format == MOEDGE_BF16 || format == MOEDGE_FP16) memcpy(&codes[2 * i], &two, 2);
            else if (format == MOEDGE_INT8) codes[i] = uint8_t(int(random() % 255) - 127);
            else if (i % 2) codes[i / 2] = uint8_t(random());
        }
        for (int64_t i = 0; i < vectors_count * groups; i++) {
            scales.push_back(to_half(0.01f + 0.02f * float(random() % 100) / 100));
            if (format == MOEDGE_INT4) zeros.push_back(to_half(0.1f * normal(random)));
        }
        vectors.codes = codes.data();
        vectors.scales = groups ? scales.data() : nullptr;
        vectors.zeros = format == MOEDGE_INT4 ? zeros.data() : nullptr;
        vectors.format = moedge_format(format);
        vectors.width = width;
    }

    double at(int64_t id, int head, int offset, int d) const {
        const int width = vectors.width, format = vectors.format;
        const int64_t vector = (id * heads + head) * block + offset, index = vector * width + d;
        float single;
        uint16_t two;
        if (format == MOEDGE_FP32) {
            memcpy(&single, &codes[4 * index], 4);
            return single;
        }
        if (format == MOEDGE_BF16 || format == MOEDGE_FP16) {
            memcpy(&two, &codes[2 * index], 2);
            return format == MOEDGE_BF16 ? from_bf16(two) : from_half(two);
        }
        const int group = format == MOEDGE_INT4 && d >= width / 2;
        const int64_t factor = ((id * heads + head) * groups + group) * block + offset;
        if (format == MOEDGE_INT8) return double(int8_t(codes[index])) * from_half(scales[factor]);
        const uint8_t both = codes[vector * (width / 2) + d % (width / 2)];
        return (group ? both >> 4 : both & 15) * from_half(scales[factor]) + from_half(zeros[factor]);
    }
};

struct Case {
    moedge_attention a{};
    std::unique_ptr<Side> keys, rotated, values;
    std::vector<int32_t> tables, pieces;
    std::vector<moedge_rows> rows;
    std::vector<float> queries, sinks, shift;
    std::vector<uint16_t> narrow;
    std::vector<float> partials;
    int num_rows = 0, heads = 0, width = 0;

    explicit Case(Random &random) {
        const bool latent = random() % 6 == 0;
        const int formats[] = {MOEDGE_FP32, MOEDGE_BF16, MOEDGE_FP16, MOEDGE_INT8, MOEDGE_INT4};
        a.kv_heads = latent ? 1 : among(random, {1, 2, 3});
        a.group = among(random, {1, 2, 3, 4, 7, 8, 9, 16, 21});
        a.block = among(random, {1, 5, 16, 32});
        heads = a.kv_heads * a.group;
        const int dim = among(random, {2, 6, 16, 30, 64, 80, 96, 128, 130, 256}), format = formats[random() % 5];
        std::vector<int> lengths;
        for (int i = among(random, {1, 2, 3}); i > 0; i--) lengths.push_back(among(random, {1, 2, 16, 31, 255, 256, 257, 600}));
        int blocks = 0, longest = 0;
        for (int length : lengths) {
            const int count = (length + a.block - 1) / a.block;
            blocks += count;
            longest = count > longest ? count : longest;
        }
        a.table_width = longest;
        keys.reset(new Side(random, format, dim, blocks, a.kv_heads, a.block));
        a.keys[0] = keys->vectors;
        a.num_parts = 1;
        if (latent) {
            rotated.reset(new Side(random, format == MOEDGE_INT4 ? int(MOEDGE_INT8) : format, 24, blocks, 1, a.block));
            a.keys[a.num_parts++] = rotated->vectors;
        } else {
            values.reset(new Side(random, random() % 3 ? format : formats[random() % 5], dim, blocks, a.kv_heads, a.block));
        }
        a.values = (latent ? *keys : *values).vectors;
        width = dim + (latent ? 24 : 0);
        a.window = random() % 3 ? 0 : among(random, {1, 20, 300, 5000});
        a.chunk = a.window || random() % 3 ? 0 : among(random, {3, 100, 256});
        a.scale = 1 / sqrtf(float(width));
        a.softcap = random() % 3 ? 0.0f : 4.0f;
        a.exact = random() % 3 == 0;
        int block = 0;
        for (size_t i = 0; i < lengths.size(); i++) {
            for (int j = 0; j < longest; j++) tables.push_back(j * a.block < lengths[i] ? block++ : -1);
            const int count = 1 + int(random() % (lengths[i] < MOEDGE_ROWS ? lengths[i] : MOEDGE_ROWS));
            rows.push_back({int32_t(i), num_rows, count, lengths[i] - count});
            num_rows += count;
        }
        for (int i = 0; i < num_rows * heads * width; i++) queries.push_back(from_bf16(to_bf16(normal(random))));
        for (int i = 0; i < heads; i++) sinks.push_back(normal(random));
        for (int i = 0; i < num_rows * heads; i++) shift.push_back(normal(random));
        for (float x : queries) narrow.push_back(to_bf16(x));
        a.tables = tables.data();
        a.rows = rows.data();
        a.sinks = random() % 2 ? sinks.data() : nullptr;
        a.shift = random() % 2 ? shift.data() : nullptr;
        a.query_format = random() % 2 ? MOEDGE_FP32 : MOEDGE_BF16;
        a.queries = a.query_format == MOEDGE_FP32 ? (const void *)queries.data() : narrow.data();
        a.rotated = !latent && (dim & (dim - 1)) == 0 && random() % 3 == 0;
        for (size_t i = 0; i < rows.size(); i++)
            for (int split = first(rows[i].position) / MOEDGE_SPLIT; split <= (rows[i].position + rows[i].count - 1) / MOEDGE_SPLIT; split++) {
                pieces.push_back(int32_t(i));
                pieces.push_back(split);
            }
        a.partial_stride = int64_t(MOEDGE_ROWS) * a.group * (a.values.width + 2);
        partials.resize(pieces.size() / 2 * a.kv_heads * a.partial_stride);
    }

    int first(int position) const {
        if (a.chunk) return position / a.chunk * a.chunk;
        return a.window && position >= a.window ? position - a.window + 1 : 0;
    }

    template <class Kernel>
    void share(Kernel kernel, int64_t items, int threads) {
        std::vector<std::thread> running;
        const int64_t nbytes = (moedge_attention_scratch(&a) + 63) / 64 * 64;
        for (int i = 0; i < threads; i++)
            running.emplace_back([&, i] {
                std::unique_ptr<void, void (*)(void *)> scratch(aligned_alloc(64, size_t(nbytes)), free);
                kernel(&a, items * i / threads, items * (i + 1) / threads, scratch.get());
            });
        for (auto &thread : running) thread.join();
    }

    std::vector<float> run(int threads, bool split) {
        std::vector<float> out(size_t(num_rows) * heads * a.values.width, NAN);
        a.out = out.data();
        a.out_format = MOEDGE_FP32;
        a.num_pieces = split ? int(pieces.size() / 2) : 0;
        a.pieces = pieces.data();
        a.partials = partials.data();
        const int64_t tiles = int64_t(rows.size()) * a.kv_heads;
        share(moedge_attend, split ? int64_t(a.num_pieces) * a.kv_heads : tiles, threads);
        if (split) share(moedge_attend_reduce, tiles, threads);
        return out;
    }

    // The relative L2 distance from sums in double.
    double error(const std::vector<float> &found) const {
        double wrong = 0, whole = 0;
        for (const moedge_rows &run : rows)
            for (int r = 0; r < run.count; r++)
                for (int head = 0; head < heads; head++) {
                    const int64_t row = int64_t(run.row + r) * heads + head;
                    std::vector<double> wanted = attend(run, run.position + r, head, row);
                    for (int d = 0; d < a.values.width; d++) {
                        const double difference = wanted[d] - found[row * a.values.width + d];
                        wrong += difference * difference;
                        whole += wanted[d] * wanted[d];
                    }
                }
        return sqrt(wrong / whole);
    }

    std::vector<double> attend(const moedge_rows &run, int position, int head, int64_t row) const {
        std::vector<double> q(queries.begin() + row * width, queries.begin() + (row + 1) * width), p, sums(a.values.width);
        if (a.rotated) rotate(q);
        const Side &side = values ? *values : *keys;
        double top = a.sinks ? a.sinks[head] : -INFINITY, total = 0;
        for (int t = first(position); t <= position; t++) {
            const int id = tables[run.table * a.table_width + t / a.block], kv = head / a.group, offset = t % a.block;
            double score = 0;
            for (int d = 0; d < width; d++)
                score += q[d] * (d < keys->vectors.width ? keys->at(id, kv, offset, d) : rotated->at(id, kv, offset, d - keys->vectors.width));
            score = score * a.scale + (a.shift ? a.shift[row] : 0);
            p.push_back(a.softcap > 0 ? a.softcap * tanh(score / a.softcap) : score);
            top = p.back() > top ? p.back() : top;
        }
        for (double &x : p) total += x = exp(x - top);
        if (a.sinks) total += exp(a.sinks[head] - top);
        for (int t = first(position); t <= position; t++) {
            const int id = tables[run.table * a.table_width + t / a.block];
            for (int d = 0; d < a.values.width; d++) sums[d] += p[t - first(position)] / total * side.at(id, head / a.group, t % a.block, d);
        }
        return sums;
    }

    static void rotate(std::vector<double> &x) {
        for (size_t half = 1; half < x.size(); half *= 2)
            for (size_t i = 0; i < x.size(); i++)
                if (!(i & half)) {
                    const double first = x[i], second = x[i + half];
                    x[i] = (first + second) * sqrt(0.5);
                    x[i + half] = (first - second) * sqrt(0.5);
                }
    }
};

bool same(const std::vector<float> &a, const std::vector<float> &b) { return !memcmp(a.data(), b.data(), a.size() * sizeof(float)); }

}  // namespace

int main(int count, char **arguments) {
    const int cases = count > 1 ? atoi(arguments[1]) : 20, seed = count > 2 ? atoi(arguments[2]) : 0;
    double worst = 0;
    std::vector<std::vector<float>> in_registers(cases);
    for (int set = MOEDGE_AVX2; set <= moedge_supported(); set++) {
        moedge_choose(set);
        for (int number = 0; number < cases; number++) {
            Random random(uint32_t(seed + number));
            Case one(random);
            const std::vector<float> found = one.run(1, false);
            const double error = one.error(found), most = one.a.exact || set < MOEDGE_AVX512BF16 ? 2e-5 : 1.5e-2;
            bool equal = same(found, one.run(3, false)) && same(found, one.run(3, true));
            if (set == MOEDGE_AVX512BF16) in_registers[number] = found;
            if (set == MOEDGE_AMX) equal = equal && same(found, in_registers[number]);
            worst = error > worst ? error : worst;
            if (!(error < most) || !equal) {
                printf("set %d, seed %d: error %g, wanted at most %g; bits %s\n", set, seed + number, error, most,
                       equal ? "equal" : "differ");
                return 1;
            }
        }
    }
    printf("%d cases of %d instruction sets, errors of at most %g\n", cases, moedge_supported(), worst);
    return 0;
}
