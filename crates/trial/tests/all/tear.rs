//! `tear`: all examples, a protocol in Rust, what is torn, stale or lost, expressions, and refusals.

use farside_sim::nic::Verb;
use farside_trial::tear::expression::{Expression, Known, Names};
use farside_trial::tear::layout::Field;
use farside_trial::tear::truth::{Kind, Seen, Truth};
use farside_trial::tear::{
    Attempt, Coverage, Description, Far, Found, Posting, Protocol, Search, Shape, search, story,
};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Number of schedules of an example that is correct, of one that is broken, and of the long test.
const SCHEDULES: u64 = 1_000;
const SCHEDULES_OF_BROKEN: u64 = 20_000;
const SOAK_SCHEDULES: u64 = 1_000_000;

/// Returns the path and the text of each example.
fn examples() -> Vec<(PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tear");
    let entries =
        std::fs::read_dir(folder).expect("the examples").map(|entry| entry.expect("an entry").path());
    let mut paths: Vec<PathBuf> = entries.collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), std::fs::read_to_string(path).expect("text"))).collect()
}

fn example(name: &str) -> Rc<Description> {
    let (_, text) = examples().into_iter().find(|(path, _)| path.ends_with(name)).expect("an example");
    Rc::new(Description::parse(&text).expect("it is well-formed"))
}

fn is_broken(path: &Path) -> bool {
    path.to_string_lossy().ends_with("-broken.toml")
}

fn searched(protocol: &Rc<Description>, schedules: u64, relaxed: bool) -> (Coverage, Option<Found>) {
    search(protocol, &Search { seed: 1, schedules, relaxed: relaxed || protocol.relaxed })
}

#[test]
fn a_finding_is_made_in_each_broken_example() {
    let mut kinds = Vec::new();
    for (path, text) in examples().into_iter().filter(|(path, _)| is_broken(path)) {
        let protocol = Rc::new(Description::parse(&text).expect("it is well-formed"));
        let (coverage, found) = searched(&protocol, SCHEDULES_OF_BROKEN, false);
        let found = found.unwrap_or_else(|| panic!("nothing was found in {}: {coverage:?}", path.display()));
        let (_, finding) = found.ran.finding.as_ref().expect("a finding");
        println!(
            "{}: {:?} by schedule {}, from {:?} to {:?}: {}",
            path.display(),
            finding.kind,
            coverage.schedules,
            found.sizes[0],
            found.sizes[1],
            finding.text
        );
        assert!(found.sizes[1] <= found.sizes[0], "{:?}", found.sizes);
        kinds.push(finding.kind);
    }
    assert!(kinds.len() >= 12, "the examples are found");
    for kind in [Kind::Torn, Kind::Stale, Kind::Stuck] {
        assert!(kinds.contains(&kind), "no example shows {kind:?}");
    }
}

fn nothing_is_found(schedules: u64) {
    let mut correct = 0;
    for (path, text) in examples().into_iter().filter(|(path, _)| !is_broken(path)) {
        let protocol = Rc::new(Description::parse(&text).expect("it is well-formed"));
        let orders: &[bool] = if protocol.holds_relaxed { &[false, true] } else { &[false] };
        for &relaxed in orders {
            let (coverage, found) = searched(&protocol, schedules, relaxed);
            let told = found.map(|found| {
                story::table(&story::tell(&*protocol, protocol.accept(), &found.plan, &found.ran))
            });
            assert_eq!(told, None, "{}, relaxed {relaxed}", path.display());
            // Otherwise the schedules have tested nothing.
            assert!(coverage.orders > schedules / 2, "{}: {coverage:?}", path.display());
            assert!(coverage.accepted > schedules && coverage.writes > schedules, "{coverage:?}");
            println!("{}, relaxed {relaxed}: {coverage:?}", path.display());
        }
        correct += 1;
    }
    assert!(correct >= 12, "the examples are found");
}

#[test]
fn nothing_is_found_in_an_example_that_is_correct() {
    nothing_is_found(SCHEDULES);
}

#[test]
#[ignore = "takes an hour"]
fn soak_nothing_is_found_in_an_example_that_is_correct() {
    nothing_is_found(SOAK_SCHEDULES);
}

#[test]
fn schemes_that_free_the_lock_by_their_write_fail_if_its_lines_land_in_any_order() {
    for name in ["unlatch.toml", "v2-footer.toml", "crc-footer.toml", "versions-footer.toml"] {
        let protocol = example(name);
        assert!(!protocol.holds_relaxed, "{name}");
        let (coverage, found) = searched(&protocol, SCHEDULES_OF_BROKEN, true);
        assert!(found.is_some(), "{name}: {coverage:?}");
    }
}

#[test]
fn the_published_flaws_are_described_in_40_lines() {
    for name in ["header-footer-broken.toml", "sherman-entry-broken.toml", "sherman-node-broken.toml"] {
        let (_, text) = examples().into_iter().find(|(path, _)| path.ends_with(name)).expect("an example");
        assert!(text.lines().count() <= 40, "{name}");
    }
}

#[test]
fn header_and_footer_fail_by_one_read_around_one_write() {
    let protocol = example("header-footer-broken.toml");
    let (_, found) = searched(&protocol, SCHEDULES_OF_BROKEN, false);
    let found = found.expect("it is broken");
    let [before, after] = found.sizes;
    assert!(after < before && after.operations == 2 && after.writes == 1, "{before:?}, {after:?}");
    let lines = story::tell(&*protocol, protocol.accept(), &found.plan, &found.ran);
    let place = |what: &str, lines: &[story::Line]| lines.iter().position(|line| line.what == what);
    let (land, last) = (place("land", &lines).expect("a WRITE lands"), lines.last().expect("lines"));
    assert_eq!((last.what, last.who.as_str()), ("accepts", "reader 1"));
    // Lines are read before and after the WRITE.
    let (early, late) = lines.split_at(land);
    assert!(
        early.iter().chain(late).filter(|line| line.who == "reader 1" && line.what == "read").count() >= 2
    );
    assert!(place("read", late).is_some(), "{}", story::table(&lines));
}

#[test]
fn a_search_is_the_same_each_time_and_its_seed_finds_it_at_once() {
    let protocol = example("naive-broken.toml");
    let tell = |search_: &Search| {
        let (coverage, found) = search(&protocol, search_);
        let found = found.expect("it is broken");
        let lines = story::tell(&*protocol, protocol.accept(), &found.plan, &found.ran);
        (coverage.schedules, found.seed, lines)
    };
    let first = Search { seed: 1, schedules: SCHEDULES_OF_BROKEN, relaxed: false };
    let (schedules, seed, lines) = tell(&first);
    assert_eq!(tell(&first), (schedules, seed, lines.clone()));
    assert_eq!(tell(&Search { seed, schedules: 1, ..first }), (1, seed, lines));
}

/// Two words in two lines. A reader that checks takes equal words only.
struct TwoWords {
    shape: Shape,
    kinds: Vec<String>,
    checks: bool,
}

impl TwoWords {
    fn new(checks: bool) -> Rc<TwoWords> {
        let shape = Shape { start: vec![0; 72], data: vec![0..8, 64..72], writers_max: 1, readers_max: 2 };
        Rc::new(TwoWords { shape, kinds: vec!["put".to_owned()], checks })
    }
}

fn posting(verb: Verb) -> Vec<Posting> {
    vec![Posting { verb, is_fenced: false, text: "verb".into() }]
}

impl Protocol for TwoWords {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn kinds(&self) -> &[String] {
        &self.kinds
    }

    async fn write<F: Far>(&self, far: &F, _kind: usize) -> Attempt {
        let mut image = vec![0; 72];
        far.update(&mut image);
        far.post(posting(Verb::Write { at: 0, bytes: image })).await;
        Attempt::Done
    }

    async fn read<F: Far>(&self, far: &F) -> Attempt {
        let bytes = far.post(posting(Verb::Read { at: 0, len: 72 })).await.remove(0);
        if self.checks && bytes[..8] != bytes[64..] { Attempt::Again } else { Attempt::Done }
    }
}

#[test]
fn a_protocol_may_be_written_in_rust() {
    let what = Search { seed: 1, schedules: SCHEDULES, relaxed: false };
    let (_, found) = search(&TwoWords::new(false), &what);
    let (_, finding) = found.expect("one READ of two lines is torn").ran.finding.expect("a finding");
    assert_eq!(finding.kind, Kind::Torn);
    let (coverage, found) = search(&TwoWords::new(true), &what);
    assert!(found.is_none() && coverage.torn_reads > 0 && coverage.again > 0, "{coverage:?}");
}

/// Returns what READs of these bytes have returned.
fn seen(size: usize, reads: &[(usize, &[u8])]) -> Seen {
    let mut seen = Seen::nothing(size);
    reads.iter().for_each(|(at, bytes)| seen.add(*at, bytes));
    seen
}

#[test]
fn the_truth_tells_torn_stale_and_lost() {
    let data = [0..2, 4..6];
    let mut truth = Truth::new(&data);
    let mut image = [9; 6];
    let none = seen(6, &[]);
    assert_eq!(truth.create(&mut image, &none, 10), Some(1));
    assert_eq!(image, [1, 1, 9, 9, 1, 1], "data alone is filled");
    let whole = |number: u8| seen(6, &[(0, &[number, number, 7, 8, number, number])]);
    assert_eq!(truth.accept(&whole(0), 15), Ok(Some(0)), "the write has not completed");
    assert_eq!(truth.complete(1, 20), Ok(()));
    assert_eq!(truth.accept(&whole(0), 20), Ok(Some(0)), "it had not completed before the read began");
    let stale = truth.accept(&whole(0), 21).expect_err("write 1 was complete");
    assert_eq!(stale.kind, Kind::Stale);
    assert!(stale.text.contains("write 0") && stale.text.contains("write 1"), "{}", stale.text);
    let torn = truth.accept(&seen(6, &[(0, &[1, 1, 0, 0, 1, 0])]), 21).expect_err("two writes");
    assert_eq!(torn.kind, Kind::Torn);
    assert!(torn.text.contains("bytes 0 to 4 of write 1, byte 5 of write 0"), "{}", torn.text);
    assert_eq!(truth.accept(&seen(6, &[(0, &[1])]), 21), Ok(Some(1)), "a part was read");
    assert!(truth.accept(&whole(3), 21).is_err(), "nobody has written it");

    // Writes 2 and 3 overlap: neither makes the other stale.
    assert_eq!(truth.create(&mut image, &whole(1), 30), Some(2));
    assert_eq!(truth.create(&mut image, &whole(1), 31), Some(3));
    assert_eq!(truth.complete(2, 40), Ok(()));
    let lost = truth.complete(3, 41).expect_err("both have changed write 1");
    assert_eq!(lost.kind, Kind::Lost);
    assert_eq!((truth.accept(&whole(2), 50), truth.accept(&whole(3), 50)), (Ok(Some(2)), Ok(Some(3))));
    // A writer that has READ a torn value.
    assert_eq!(truth.create(&mut image, &seen(6, &[(0, &[2, 2, 0, 0, 3, 3])]), 60), Some(4));
    assert_eq!(truth.complete(4, 70).expect_err("it is torn").kind, Kind::Torn);
    assert_eq!(truth.count(), 4);
}

#[test]
fn expressions_have_the_values_of_arithmetic() {
    let field = |name: &str, at, len, copies, is_data| Field {
        name: name.to_owned(),
        at,
        len,
        copies,
        every: 8,
        is_data,
    };
    let fields = [field("a", 0, 1, 1, false), field("v", 8, 2, 3, false), field("body", 32, 9, 1, true)];
    let reads = [("old".to_owned(), 0..34)];
    let results = ["was".to_owned()];
    let names = Names { fields: &fields, reads: &reads, results: &results };
    let mut image = vec![0; 48];
    image[0] = 5;
    for (at, number) in [(8, 7_u16), (16, 7), (24, 0x107)] {
        image[at..at + 2].copy_from_slice(&number.to_le_bytes());
    }
    image[32..41].copy_from_slice(b"123456789");
    let mut old = image.clone();
    old[0] = 6;
    let known = Known { image, reads: vec![old], results: vec![3] };
    let numbers = [
        ("a + 2 * 3", 11),
        ("(a + 2) * 3", 21),
        ("a - 6", u64::MAX),
        ("-1", u64::MAX),
        ("1 << 4 + 1", 32),
        ("v[2] & 0xff", 7),
        ("v[2] & 0xf0 + 15", 7),
        ("(a + 12) % 16", 1),
        ("old.a + was", 9),
        ("1 << 64", 0),
        ("1_000", 1_000),
        // The check value of CRC-64/NVME.
        ("crc64(body)", 0xae8b_1486_0a79_9888),
    ];
    for (text, value) in numbers {
        let parsed = Expression::number(text, names).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(parsed.value(&fields, &known), value, "{text}");
    }
    let conditions = [
        ("a == 5", true),
        ("not a == 5", false),
        ("a == 5 and old.a == 6 or a < 0", true),
        ("a < 5 or a <= 5 and a > 5 or a >= 6", false),
        ("not (a == 4 or was != 3)", true),
        ("all(v == v[0])", false),
        ("any(v == 263)", true),
        ("all(v & 255 == 7)", true),
        ("all(old.v == v)", true),
        ("true and not false", true),
        ("a < 1 << 60", true),
    ];
    for (text, holds) in conditions {
        let parsed = Expression::condition(text, names).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(parsed.holds(&fields, &known), holds, "{text}");
    }
    let refused = [
        ("", "it ends where"),
        ("a", "compare it"),
        ("a == ", "it ends where"),
        ("b == 1", "nothing has the name 'b': name one of a, v, body, old, was"),
        ("v == 1", "'v' has 3 copies"),
        ("v[3] == 1", "v[3] does not exist"),
        ("all(a == 5)", "names no field with copies"),
        ("all(v)", "write a condition in it"),
        ("body == 1", "is no number"),
        ("old.body == 1", "is no number"),
        ("crc64(old.body) == 1", "does not return all of"),
        ("a == 5 == 5", "takes two numbers"),
        ("a and a", "takes two conditions"),
        ("a == 5 a", "is not expected here"),
        ("(a == 5", "write ')' there"),
        ("a % 0 == 1", "number above 0"),
        ("a == 99999999999999999999", "is no number"),
        ("a = 5", "'=' has no meaning here"),
        ("and == 1", "stands where a field is expected"),
        ("all(any(v == 1))", "within all or any"),
        ("old == 1", "write '.' there"),
    ];
    for (text, reason) in refused {
        let error = Expression::condition(text, names).expect_err(text);
        assert!(error.contains(reason), "'{text}': expected '{reason}', got '{error}'");
    }
    let deep = format!("{}a == 5{}", "(".repeat(300), ")".repeat(300));
    assert!(Expression::condition(&deep, names).expect_err("deep").contains("nested deeper"));
    assert!(Expression::condition(&"a".repeat(2_000), names).expect_err("long").contains("at most"));
}

#[test]
fn a_wrong_description_is_refused_with_its_line_and_a_remedy() {
    let (_, good) =
        examples().into_iter().find(|(path, _)| path.ends_with("header-footer-broken.toml")).expect("it");
    let line_of = |text: &str, part: &str| text[..text.find(part).expect(part)].matches('\n').count() + 1;
    let changes = [
        ("size = 192", "size = 0", "give it a size from 1 to"),
        ("size = 192", "size = 100", "beyond the object's 100"),
        ("size = 192", "size = -1", "compare the file"),
        ("size = 192", "sizes = 192", "unknown field `sizes`"),
        ("size = 192", "size = 192\nwriters_max = 9", "9 writers cannot run: give 1 to 4"),
        ("size = 192", "size = 192\nreaders_max = 0", "0 readers cannot run: give 1 to 4"),
        ("size = 192", "size = 192\nstart = [\"READ all\"]", "start takes set alone"),
        ("front = { at = 8,", "front = { at = 4,", "both have byte"),
        ("rear = { at = 184, len = 8", "rear = { at = 190, len = 8", "ends at byte 198, beyond"),
        ("rear = { at = 184,", "rear = { at = 18446744073709551615,", "ends at byte 2^64, beyond"),
        ("rear = { at = 184, len = 8", "rear = { at = 184, len = 0", "has no bytes"),
        (
            "rear = { at = 184, len = 8",
            "rear = { at = 184, len = 4, every = 2, copies = 2",
            "must be at least its len",
        ),
        ("rear = {", "all = {", "has a meaning of its own"),
        (", data = true", "", "no field is data"),
        ("\"update\"", "\"READ lock\"", "no writer has the step update"),
        ("\"update\"", "\"update front\"", "update takes nothing"),
        ("\"CAS lock 0 -> 1\"", "\"LOCK lock\"", "'LOCK' is no verb and no step"),
        ("\"CAS lock 0 -> 1\"", "\"CAS lock 0 1\"", "write it like CAS lock 0 -> 1"),
        ("\"CAS lock 0 -> 1\"", "\"CAS body 0 -> 1\"", "change its at or len"),
        ("\"FAA lock - 1\"", "\"FAA lock\"", "write it like FAA lock + 1"),
        ("\"FAA lock - 1\"", "\"FAA latch - 1\"", "there is no field 'latch'"),
        ("\"FAA lock - 1\"", "\"post FAA lock - 1 as old\"", "nothing waits for 'old'"),
        ("\"READ front..rear\",", "\"post READ front..rear\",", "drop post"),
        ("\"READ front..rear\",", "\"READ rear..front\",", "ends before it begins"),
        ("\"READ front..rear\",", "", "whose value this client does not know"),
        ("\"set rear = front\"", "\"set rear front\"", "has no '='"),
        ("\"set rear = front\"", "\"set body = front\"", "is data, which no step may choose"),
        ("\"set rear = front\"", "\"set rear = back\"", "nothing has the name 'back'"),
        ("steps = [\"READ front..rear\"]", "steps = [\"READ front\"]", "the reader READs no data"),
        ("accept = \"front == rear\"", "accept = \"front == tail\"", "nothing has the name 'tail'"),
        ("accept = \"front == rear\"", "accept = \"front\"", "compare it, as in version == 0"),
        ("accept = \"front == rear\"", "", "missing field `accept`"),
        ("[reader]", "[reader", "compare the file"),
    ];
    for (from, to, reason) in changes {
        assert!(good.contains(from), "{from}");
        let text = good.replacen(from, to, 1);
        let error = Description::parse(&text).expect_err(to);
        assert!(error.to_string().contains(reason), "'{to}': expected '{reason}', got '{error}'");
        assert!(error.line.is_some(), "'{to}': {error}");
    }
    // The line is that of the mistake.
    let text = good.replace("\"set rear = front\"", "\"set rear = back\"");
    let error = Description::parse(&text).expect_err("an unknown field");
    assert_eq!(error.line, Some(line_of(&text, "set rear = back")));
    let text = good.replace("rear = { at = 184", "rear = { at = 185");
    let error = Description::parse(&text).expect_err("a field beyond the object");
    assert_eq!(error.line, Some(line_of(&text, "at = 185")));
}
