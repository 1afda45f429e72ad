#include "json.hpp"

#include <charconv>
#include <cmath>
#include <set>

#include "error.hpp"

namespace fp4d {
namespace {

constexpr size_t MAX_VALUES = 4'000'000;  // a graph of the most nodes and forms has fewer; bounds the memory

class Parser {
public:
    Parser(std::string_view text, const Dialect& dialect, const char* source)
        : at_(text.data()), end_(text.data() + text.size()), dialect_(dialect), source_(source) {}

    Value whole() {
        space();
        Value value = parse(1);
        space();
        if (at_ != end_) fail("has text after its end");
        return value;
    }

private:
    [[noreturn]] void fail(const char* cause) { refuse(std::string(source_) + " " + cause); }

    void space() {
        while (at_ != end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\n' || *at_ == '\r')) ++at_;
    }

    char peek() { return at_ != end_ ? *at_ : '\0'; }

    bool word(std::string_view expected) {
        if (size_t(end_ - at_) < expected.size() || std::string_view(at_, expected.size()) != expected) return false;
        at_ += expected.size();
        return true;
    }

    Value parse(int depth) {
        if (++values_ > MAX_VALUES) fail("has too many values");
        Value value;
        switch (peek()) {
            case '{': return object(depth);
            case '[': return array(depth);
            case '"':
                value.kind = Value::String;
                value.text = string();
                return value;
            case 't':
            case 'f':
                value.kind = Value::Bool;
                value.truth = *at_ == 't';
                if (!word(value.truth ? "true" : "false")) fail("is no JSON");
                return value;
            case 'n':
                if (!word("null")) fail("is no JSON");
                return value;
            default: return number();
        }
    }

    Value object(int depth) {
        if (depth > dialect_.depth) fail("is nested too deeply");
        Value value;
        value.kind = Value::Object;
        std::set<std::string> known;
        ++at_;
        space();
        if (peek() == '}') return ++at_, value;
        while (true) {
            if (peek() != '"') fail("has a key that is no text");
            std::string key = string();
            if (dialect_.unique_keys && !known.insert(key).second) fail("has a key twice");
            space();
            if (peek() != ':') fail("lacks a colon");
            ++at_;
            space();
            value.fields.emplace_back(std::move(key), parse(depth + 1));
            space();
            if (peek() == '}') return ++at_, value;
            if (peek() != ',') fail("lacks a comma");
            ++at_;
            space();
        }
    }

    Value array(int depth) {
        if (depth > dialect_.depth) fail("is nested too deeply");
        Value value;
        value.kind = Value::Array;
        ++at_;
        space();
        if (peek() == ']') return ++at_, value;
        while (true) {
            value.items.push_back(parse(depth + 1));
            space();
            if (peek() == ']') return ++at_, value;
            if (peek() != ',') fail("lacks a comma");
            ++at_;
            space();
        }
    }

    Value number() {
        Value value;
        const char* const start = at_;
        if (dialect_.constants) {
            const bool minus = word("-Infinity");
            if (minus || word("Infinity") || word("NaN")) {
                value.kind = Value::Float;
                value.number = minus ? -INFINITY : start[0] == 'N' ? NAN : INFINITY;
                return value;
            }
        }
        if (peek() == '-') ++at_;
        if (peek() == '0') {
            ++at_;
        } else if (!digits()) {
            fail("is no JSON");
        }
        bool integer = true;
        if (peek() == '.') {
            integer = false;
            ++at_;
            if (!digits()) fail("has a number without digits");
        }
        if (peek() == 'e' || peek() == 'E') {
            integer = false;
            ++at_;
            if (peek() == '+' || peek() == '-') ++at_;
            if (!digits()) fail("has a number without digits");
        }
        value.kind = integer ? Value::Int : Value::Float;
        const auto read = std::from_chars(start, at_, value.number);
        if (read.ec == std::errc::result_out_of_range) {
            // Too large or too small: the exponent, or the number of digits, says which.
            value.number = beyond(start, at_) ? (*start == '-' ? -INFINITY : INFINITY) : (*start == '-' ? -0.0 : 0.0);
        }
        if (integer) {
            const auto whole = std::from_chars(start, at_, value.integer);
            value.large = whole.ec != std::errc{};
            if (value.large) {
                value.integer = *start == '-' ? -1 : 1;
                uint64_t wide = 0;
                const bool fits = *start != '-' && std::from_chars(start, at_, wide).ec == std::errc{};
                if (dialect_.bounded && !fits) fail("has a number that is too large");
            }
            if (dialect_.bounded && at_ - start > 20) fail("has a number that is too large");
        }
        if (dialect_.finite && !integer && std::isinf(value.number)) fail("has a number that is too large");
        return value;
    }

    static bool beyond(const char* start, const char* end) {
        for (const char* at = start; at != end; ++at)
            if (*at == 'e' || *at == 'E') return at[1] != '-';
        return *start == '-' ? start[1] != '0' : *start != '0';
    }

    bool digits() {
        const char* const start = at_;
        while (at_ != end_ && *at_ >= '0' && *at_ <= '9') ++at_;
        return at_ != start;
    }

    unsigned hex() {
        unsigned found = 0;
        for (int count = 0; count < 4; ++count) {
            const char letter = peek();
            const int digit = letter >= '0' && letter <= '9'   ? letter - '0'
                              : letter >= 'a' && letter <= 'f' ? letter - 'a' + 10
                              : letter >= 'A' && letter <= 'F' ? letter - 'A' + 10
                                                               : -1;
            if (digit < 0) fail("has a wrong escape");
            found = found * 16 + unsigned(digit);
            ++at_;
        }
        return found;
    }

    static void utf8(std::string& text, unsigned point) {
        if (point < 0x80) {
            text += char(point);
        } else if (point < 0x800) {
            text += char(0xC0 | (point >> 6));
            text += char(0x80 | (point & 0x3F));
        } else if (point < 0x10000) {
            text += char(0xE0 | (point >> 12));
            text += char(0x80 | ((point >> 6) & 0x3F));
            text += char(0x80 | (point & 0x3F));
        } else {
            text += char(0xF0 | (point >> 18));
            text += char(0x80 | ((point >> 12) & 0x3F));
            text += char(0x80 | ((point >> 6) & 0x3F));
            text += char(0x80 | (point & 0x3F));
        }
    }

    std::string string() {
        std::string text;
        ++at_;
        while (true) {
            if (at_ == end_) fail("ends inside a text");
            const unsigned char letter = (unsigned char)*at_++;
            if (letter == '"') return text;
            if (letter < 0x20) fail("has a control character in a text");
            if (letter != '\\') {
                text += char(letter);
                continue;
            }
            const char escape = peek();
            ++at_;
            switch (escape) {
                case '"': text += '"'; break;
                case '\\': text += '\\'; break;
                case '/': text += '/'; break;
                case 'b': text += '\b'; break;
                case 'f': text += '\f'; break;
                case 'n': text += '\n'; break;
                case 'r': text += '\r'; break;
                case 't': text += '\t'; break;
                case 'u': {
                    unsigned point = hex();
                    if (point >= 0xDC00 && point < 0xE000) fail("has half a character");
                    if (point >= 0xD800 && point < 0xDC00) {
                        if (!word("\\u")) fail("has half a character");
                        const unsigned low = hex();
                        if (low < 0xDC00 || low >= 0xE000) fail("has half a character");
                        point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
                    }
                    utf8(text, point);
                    break;
                }
                default: fail("has a wrong escape");
            }
        }
    }

    const char* at_;
    const char* end_;
    const Dialect& dialect_;
    const char* source_;
    size_t values_ = 0;
};

bool is_utf8(std::string_view text) {
    for (size_t at = 0; at < text.size();) {
        const auto byte = [&](size_t offset) { return at + offset < text.size() ? (unsigned char)text[at + offset] : 0u; };
        const unsigned first = byte(0);
        const int more = first < 0x80 ? 0 : first >= 0xC2 && first < 0xE0 ? 1 : first >= 0xE0 && first < 0xF0 ? 2 : first >= 0xF0 && first < 0xF5 ? 3 : -1;
        if (more < 0) return false;
        for (int each = 1; each <= more; ++each)
            if ((byte(size_t(each)) & 0xC0) != 0x80) return false;
        const unsigned second = byte(1);
        if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second >= 0xA0) || (first == 0xF0 && second < 0x90) || (first == 0xF4 && second >= 0x90)) return false;
        at += size_t(more) + 1;
    }
    return true;
}

}  // namespace

const Value* Value::find(std::string_view key) const {
    for (auto field = fields.rbegin(); field != fields.rend(); ++field)
        if (field->first == key) return &field->second;
    return nullptr;
}

Value parse_json(std::string_view text, const Dialect& dialect, const char* source) {
    if (!is_utf8(text)) refuse(std::string(source) + " is no UTF-8 text");
    return Parser(text, dialect, source).whole();
}

size_t characters(std::string_view text) {
    size_t count = 0;
    for (const char letter : text) count += (letter & 0xC0) != 0x80;
    return count;
}

}  // namespace fp4d
