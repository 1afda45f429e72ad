#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <set>

#include "error.hpp"
#include "model.hpp"

// The model card (fp4deploy/models/card.py, heads.py, boxes.py): types, limits, and fields that contradict each other.
namespace fp4d {
namespace {

constexpr int64_t MAX_CLASSES = 10'000, MAX_PIXELS = 16'384;

[[noreturn]] void fail(const std::string& cause) { refuse("its model card: " + cause); }

class Object {
public:
    Object(const Value& value, std::initializer_list<const char*> known) : value_(value) {
        if (value.kind != Value::Object) fail("it is no object");
        for (const auto& [name, _] : value.fields)
            if (std::none_of(known.begin(), known.end(), [&](const char* each) { return name == each; }))
                fail("the field '" + shown(name) + "' is unknown");
    }

    const Value* maybe(const char* name) const { return value_.find(name); }
    const Value& get(const char* name) const {
        const Value* found = maybe(name);
        if (!found) fail(std::string("the field ") + name + " is missing");
        return *found;
    }

    int64_t integer(const char* name, int64_t least, int64_t most, const int64_t* usual = nullptr) const {
        const Value* value = maybe(name);
        return !value && usual ? *usual : whole(value ? *value : get(name), least, most, name);
    }
    static int64_t whole(const Value& value, int64_t least, int64_t most, const char* name) {
        if (value.kind != Value::Int || value.large || value.integer < least || value.integer > most) fail(std::string(name) + " is no number, or beyond its limits");
        return value.integer;
    }
    static double real(const Value& value, const char* name) {
        if ((value.kind != Value::Int && value.kind != Value::Float) || !std::isfinite(value.number)) fail(std::string(name) + " is no number");
        return value.number;
    }
    static std::string text(const Value& value, const char* name) {
        if (value.kind != Value::String) fail(std::string(name) + " is no text");
        const size_t count = characters(value.text);
        if (count < 1 || count > 500) fail(std::string(name) + " is empty or too long");
        return value.text;
    }
    static bool flag(const Value& value, const char* name) {
        if (value.kind != Value::Bool) fail(std::string(name) + " is neither true nor false");
        return value.truth;
    }
    const std::vector<Value>& list(const char* name, size_t least, size_t most) const {
        const Value& value = get(name);
        if (value.kind != Value::Array || value.items.size() < least || value.items.size() > most) fail(std::string(name) + " is no list of its length");
        return value.items;
    }
    std::string maybe_text(const char* name) const {
        const Value* value = maybe(name);
        return value && value->kind != Value::Null ? text(*value, name) : "";
    }

private:
    const Value& value_;
};

std::string choice(const Value& value, const char* name, std::initializer_list<const char*> valid) {
    if (value.kind == Value::String)
        for (const char* each : valid)
            if (value.text == each) return each;
    fail(std::string(name) + " has an unknown value");
}

void threshold(const Object& fields) {
    if (const Value* value = fields.maybe("threshold"))
        if (const double number = Object::real(*value, "head.threshold"); number < 0 || number >= 1) fail("head.threshold is beyond its limits");
}

Head read_head(const Value& value, int64_t names) {
    if (value.kind != Value::Object) fail("head is no object");
    const Value* method = value.find("method");
    if (!method) fail("head has no method");
    Head head;
    head.method = choice(*method, "head.method", {"centres", "set", "fcos", "fcos_relu", "retinanet"});
    const int64_t most_found = 100'000, usual_detections = 100;
    if (head.finds_boxes()) {
        const Object fields(value, {"method", "classes", "strides", "width", "depth", "threshold", "nms", "max_detections"});
        const int64_t classes = fields.integer("classes", 1, MAX_CLASSES), width = 128, depth = 2;
        head.channels = classes + (head.method == "retinanet" ? 4 : 5);
        head.anchors = head.method == "retinanet" ? 9 : 1;
        head.strides = {4, 8, 16, 32};
        if (fields.maybe("strides")) {
            head.strides.clear();
            for (const Value& each : fields.list("strides", 1, 8)) head.strides.push_back(Object::whole(each, 1, 1024, "head.strides"));
        }
        fields.integer("width", 8, 4096, &width);
        fields.integer("depth", 1, 16, &depth);
        threshold(fields);
        if (const Value* nms = fields.maybe("nms"))
            if (const double number = Object::real(*nms, "head.nms"); number <= 0 || number > 1) fail("head.nms is beyond its limits");
        fields.integer("max_detections", 1, most_found, &usual_detections);
        if (classes != names - 1) fail("head.classes is not the number of class_names");
        for (size_t at = 1; at < head.strides.size(); ++at)
            if (head.strides[at] <= head.strides[at - 1]) fail("head.strides do not ascend");
        return head;
    }
    const Object fields(value, {"method", "classes", "masks", "stuff", "nms", "threshold", "max_detections"});
    const int64_t none = 0, window = 5, classes = fields.integer("classes", 0, MAX_CLASSES), masks = fields.integer("masks", 0, 4096, &none);
    if (fields.maybe("stuff"))
        for (const Value& each : fields.list("stuff", 0, MAX_CLASSES))
            if (Object::whole(each, 0, INT64_MAX, "head.stuff") >= names) fail("head.stuff: a number is no class");
    if (fields.integer("nms", 1, 63, &window) % 2 == 0) fail("head.nms is even");
    threshold(fields);
    fields.integer("max_detections", 1, most_found, &usual_detections);
    const bool centres = head.method == "centres";
    if (classes != names && (centres || classes != 0)) fail("head.classes is not the number of class_names");
    if ((masks > 0) == centres) fail("head.masks does not fit its method");
    head.channels = classes + (centres ? 3 : masks);
    return head;
}

bool identifier(const std::string& text) {
    if (text.empty() || (text[0] >= '0' && text[0] <= '9')) return false;
    return std::all_of(text.begin(), text.end(), [](char c) {
        return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_' || (c & 0x80);
    });
}

// A model spec (fp4deploy/models/spec.py) without a scale.
bool names_a_model(const std::string& text) {
    const auto blank = [](char c) { return c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f); };
    const auto first = std::find_if_not(text.begin(), text.end(), blank);
    const auto last = std::find_if_not(text.rbegin(), std::string::const_reverse_iterator(first), blank).base();
    const std::string stripped(first, last);
    const size_t colon = stripped.rfind(':');
    if (colon == std::string::npos) return stripped == "unet";
    const std::string head = stripped.substr(0, colon), name = stripped.substr(colon + 1);
    if (head == "unet" || name.empty()) return false;
    for (const char* known : {"smp", "torchvision", "monai", "timm"})
        if (head == known) return true;
    if (!identifier(name)) return false;
    if (head.size() >= 3 && head.compare(head.size() - 3, 3, ".py") == 0) return true;
    for (size_t start = 0;;) {
        const size_t dot = head.find('.', start);
        if (!identifier(head.substr(start, dot == std::string::npos ? dot : dot - start))) return false;
        if (dot == std::string::npos) return true;
        start = dot + 1;
    }
}

}  // namespace

Card read_card(const std::string& text) {
    const Value value = parse_json(text, METADATA, "its model card");
    const Object fields(value, {"precision", "scale", "class_names", "height", "width", "mean", "std", "background", "recipe", "architecture",
                                "include", "exclude", "task", "head", "digits", "arguments", "output", "rest"});
    Card card;
    const std::string precision = choice(fields.get("precision"), "precision", {"fp16", "nvfp4"});
    if (const double scale = Object::real(fields.get("scale"), "scale"); scale <= 0 || scale > 4) fail("scale is beyond its limits");
    std::set<std::string> known;
    for (const Value& each : fields.list("class_names", 0, MAX_CLASSES)) {
        card.class_names.push_back(Object::text(each, "class_names"));
        if (!known.insert(card.class_names.back()).second) fail("class_names: a name is given twice");
    }
    card.height = fields.integer("height", 1, MAX_PIXELS);
    card.width = fields.integer("width", 1, MAX_PIXELS);
    const auto &mean = fields.list("mean", 3, 3), &std = fields.list("std", 3, 3);
    for (size_t at = 0; at < 3; ++at) {
        card.mean[at] = Object::real(mean[at], "mean"), card.std[at] = Object::real(std[at], "std");
        if (card.mean[at] < -100 || card.mean[at] > 100 || card.std[at] < 0.01 || card.std[at] > 100) fail("mean or std is beyond its limits");
    }
    Object::flag(fields.get("background"), "background");
    const Value* recipe = fields.maybe("recipe");
    const bool has_recipe = recipe && recipe->kind != Value::Null;
    fields.maybe_text("recipe");
    if (has_recipe && precision == "fp16") fail("precision = 'fp16' with a recipe");
    if (const Value* architecture = fields.maybe("architecture"))
        if (!names_a_model(Object::text(*architecture, "architecture"))) fail("architecture names no model");
    for (const char* name : {"include", "exclude"})
        if (const Value* patterns = fields.maybe(name); patterns && patterns->kind != Value::Null)
            for (const Value& each : fields.list(name, 0, 1000)) Object::text(each, name);
    std::string task = "semantic";
    if (const Value* found = fields.maybe("task")) task = choice(*found, "task", {"semantic", "instance", "detection"});
    if (const Value* head = fields.maybe("head"); head && head->kind != Value::Null) card.head = read_head(*head, int64_t(card.class_names.size()));
    if (const Value* rest = fields.maybe("rest")) choice(*rest, "rest", {"fp16", "bf16", "fp32"});
    if (const Value* digits = fields.maybe("digits")) Object::flag(*digits, "digits");
    if (const Value* arguments = fields.maybe("arguments")) {
        if (arguments->kind != Value::Object || arguments->fields.size() > 100) fail("arguments is no object, or too large");
        for (const auto& [name, _] : arguments->fields)
            if (characters(name) < 1 || characters(name) > 500) fail("arguments has a name that is empty or too long");
    }
    fields.maybe_text("output");
    const bool boxes = card.head && card.head->finds_boxes();
    if ((task == "detection") != boxes || (task == "instance") != (card.head && !boxes)) fail("task and head do not go together");
    return card;
}

}  // namespace fp4d
