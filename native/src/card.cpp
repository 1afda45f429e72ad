#include "error.hpp"
#include "model.hpp"

// What a caller needs of a model card (fp4deploy/models/card.py): class names, the size and the normalisation of images.
namespace fp4d {
namespace {

constexpr size_t MAX_CLASSES = 10'000, MAX_CHANNELS = 64;
constexpr int64_t MAX_PIXELS = 16'384;

[[noreturn]] void fail(const char* name) { refuse(std::string("its model card: ") + name + " is missing, or beyond its limits"); }

const Value& about(const Value& card, const char* name, Value::Kind kind) {
    const Value* found = card.kind == Value::Object ? card.find(name) : nullptr;
    if (!found || found->kind != kind) fail(name);
    return *found;
}

int64_t pixels(const Value& card, const char* name) {
    const Value& value = about(card, name, Value::Int);
    if (value.large || value.integer < 1 || value.integer > MAX_PIXELS) fail(name);
    return value.integer;
}

// Of volumes, of as many channels as they have, they are 0 and 1: those of a Card that nothing is written to.
void of_channels(const Value& card, const char* name, double least, double (&into)[3]) {
    const auto& items = about(card, name, Value::Array).items;
    if (items.empty() || items.size() > MAX_CHANNELS) fail(name);
    for (size_t at = 0; at < items.size(); ++at) {
        const double value = items[at].number;
        if ((items[at].kind != Value::Int && items[at].kind != Value::Float) || !(value >= least && value <= 100)) fail(name);
        if (items.size() == 3) into[at] = value;
    }
}

}  // namespace

Card read_card(const std::string& text) {
    const Value value = parse_json(text, METADATA, "its model card");
    Card card;
    for (const Value& each : about(value, "class_names", Value::Array).items) {
        if (each.kind != Value::String || card.class_names.size() == MAX_CLASSES) fail("class_names");
        card.class_names.push_back(each.text);
    }
    card.height = pixels(value, "height");
    card.width = pixels(value, "width");
    of_channels(value, "mean", -100, card.mean);
    of_channels(value, "std", 0.01, card.std);
    return card;
}

}  // namespace fp4d
