//! Tests of the memory that a key covers, to the byte, and of the effect of a refusal on the rest of a chain.

use crate::support::{Bytes, assign, free_list, grant, key, open, revoke, secret, take};
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::segment::Use;
use farside_remote::arena::session::SessionId;
use farside_remote::arena::state::Stage;
use farside_remote::arena::{Arena, SEGMENT_SIZE, session};
use farside_remote::op::{ListId, Op, cas_with, write_from};
use farside_remote::{Addr, By, Chain, ChainBuf, Key, Mode, Reply, Rights, Status};
use farside_remote::{allocate, cas, cas_from, fetch_add, read, retire, run, write};
use zerocopy::little_endian::U64;

const OWNER: u32 = 5;
const BY: By = By::itself(SessionId { slot: 1, number: OWNER });
/// The class of the tests' buffers, which have 128 bytes.
const CLASS: u8 = 4;
const BUFFER: u64 = 128;

/// A node with two regions. Region 1 has tables in segments 0, 1 and 3; region 2 has a table in segment 2. Both have
/// buffers.
struct Node {
    memory: Bytes,
    /// Addresses of two adjacent buffers of region 1.
    mine: [u64; 2],
    other: u64,
}

impl Node {
    fn new() -> Node {
        let memory = Bytes::new(16 << 20);
        for (segment, region) in [(0, 1), (1, 1), (2, 2), (3, 1)] {
            assign(&memory, segment, region, Use::Table);
        }
        [1, 2].into_iter().for_each(|region| open(&memory, region));
        grant(&memory, 4, 1, Supply::Quota);
        grant(&memory, 5, 2, Supply::Quota);
        assign(&memory, 6, 1, Use::Granted);
        let class = Class::get(CLASS).expect("a class");
        let mine = [(); 2].map(|()| take(&memory, 1, class, Supply::Quota, OWNER));
        assert_eq!(mine[1] - mine[0], BUFFER);
        let other = take(&memory, 2, class, Supply::Quota, OWNER);
        Node { memory, mine, other }
    }

    fn segment(&self, index: u32) -> u64 {
        Arena::of(&self.memory).geometry().segment_at(index)
    }

    /// One address of each kind: its name, the address, and whether the key of region 1 covers it.
    fn places(&self) -> Vec<(&'static str, Addr, bool)> {
        let node = |what, at, opened| (what, Addr::new(at), opened);
        vec![
            node("own table", self.segment(0) + 256, true),
            node("own buffer", self.mine[0], true),
            ("scratch", Addr::scratch(16), true),
            node("other's table", self.segment(2) + 256, false),
            node("other's buffer", self.other, false),
            node("header", 64, false),
            node("own key's record", 4096 * 2, false),
            node("a list's head", 4096 * 2 + 128, false),
            node("a session's turn", session::turn_at(0), false),
            node("catalog", 4096 + (1 << 20) + (256 << 10), false),
            node("segment table", 4096 + (1 << 20) + (256 << 10) + (512 << 10), false),
            node("buffers' states", self.segment(4), false),
            node("granted segment", self.segment(6), false),
            node("free segment", self.segment(7), false),
            node("beyond the end", 16 << 20, false),
            ("beyond scratch", Addr::scratch(32), false),
        ]
    }

    fn ask(&self, key: Key, build: impl FnOnce(&mut Chain<'_>)) -> Vec<Status> {
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(key);
        build(&mut chain);
        let mut reply = Reply::new();
        let Ok(()) = run(&self.memory, BY, chain.view(), &mut reply);
        reply.statuses().collect()
    }

    /// Runs a chain of one op, and returns the op's status.
    fn one<T: ?Sized>(&self, op: Op<'_, T>) -> Status {
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(key(1));
        add(&mut chain, op);
        let mut reply = Reply::new();
        let Ok(()) = run(&self.memory, BY, chain.view(), &mut reply);
        reply.verdict()
    }
}

fn add<'a, T: ?Sized>(chain: &mut Chain<'a>, op: Op<'a, T>) {
    let _ = chain.also(op);
}

/// Adds ops to a chain that access one given address.
type AddOps = fn(&mut Chain<'_>, Addr);
/// Adds ops to a chain that access two given addresses.
type AddOpsWith = fn(&mut Chain<'_>, Addr, Addr);

const WORD: &[u8; 8] = &[7; 8];
const LIST: ListId = ListId(CLASS as u32);

fn expected(opened: bool) -> Status {
    if opened { Status::Ok } else { Status::Access }
}

#[test]
fn a_key_covers_only_its_regions_data_and_the_chains_scratch() {
    let node = Node::new();
    for (what, at, opened) in node.places() {
        node.memory.watch();
        assert_eq!(node.one(read(at, 8)), expected(opened), "READ of {what}");
        assert!(!node.memory.has_changed());
        let changes: [(&str, AddOps); 3] = [
            ("WRITE", |chain, at| add(chain, write(at, WORD))),
            ("CAS", |chain, at| add(chain, cas(Mode::Ge, at, &[0u8; 8], &[0u8; 8]))),
            ("FETCH-ADD", |chain, at| add(chain, fetch_add(at, &U64::ZERO))),
        ];
        for (op, change) in changes {
            assert_eq!(node.ask(key(1), |chain| change(chain, at)), [expected(opened)], "{op} of {what}");
            assert!(opened || !node.memory.has_changed(), "{op} of {what} changed something");
        }
    }
}

/// A test case: its name, an op on prepared memory, and the rights that the op requires.
type Row = (&'static str, AddOps, Rights);

#[test]
fn an_op_requires_exactly_the_rights_to_what_it_touches() {
    const READ: Rights = Rights::READ;
    const WRITE: Rights = Rights::WRITE;
    const ATOMIC: Rights = Rights::ATOMIC;
    const ALLOCATE: Rights = Rights::ALLOCATE;
    const SCRATCH: Addr = Addr::scratch(0);
    const WORDS: [&[u8; 16]; 2] = [&[0; 16], &[1; 16]];
    // The word at `at` is a pointer to the address 64 bytes higher.
    let rows: [Row; 26] = [
        ("READ", |c, at| add(c, read(at, 40)), READ),
        ("READ of a word", |c, at| add(c, read(at, 16)), READ),
        ("indirect READ", |c, at| add(c, read(at, 40).indirect()), READ),
        ("bounded READ", |c, at| add(c, read(at, 40).indirect().bounded()), READ),
        ("READ into scratch", |c, at| add(c, read(at, 8).redirect(SCRATCH)), READ),
        ("READ into memory", |c, at| add(c, read(at, 8).redirect(at.plus(128))), READ | WRITE),
        ("READ of scratch", |c, _| add(c, read(SCRATCH, 8)), Rights::NONE),
        ("READ of scratch into memory", |c, at| add(c, read(SCRATCH, 8).redirect(at.plus(128))), WRITE),
        ("READ of nothing", |c, at| add(c, read(at, 0)), Rights::NONE),
        ("WRITE", |c, at| add(c, write(at.plus(128), WORD)), WRITE),
        ("indirect WRITE", |c, at| add(c, write(at, WORD).indirect()), READ | WRITE),
        ("bounded WRITE", |c, at| add(c, write(at, WORD).indirect().bounded()), READ | WRITE),
        ("WRITE from memory", |c, at| add(c, write_from(at.plus(128), at, 8)), READ | WRITE),
        ("WRITE from scratch", |c, at| add(c, write_from(at.plus(128), SCRATCH, 8)), WRITE),
        ("WRITE into scratch", |c, _| add(c, write(SCRATCH, WORD)), Rights::NONE),
        ("WRITE into scratch from memory", |c, at| add(c, write_from(SCRATCH, at, 8)), READ),
        ("ALLOCATE", |c, _| add(c, allocate(LIST, [WORD, b"", b""])), ALLOCATE),
        (
            "ALLOCATE, its address into memory",
            |c, at| add(c, allocate(LIST, [WORD, b"", b""]).redirect(at.plus(128))),
            ALLOCATE | WRITE,
        ),
        ("CAS", |c, at| add(c, cas(Mode::Ge, at.plus(64), WORDS[0], WORDS[1])), ATOMIC),
        ("CAS of 8", |c, at| add(c, cas(Mode::Ge, at.plus(64), &[0u8; 8], WORD)), ATOMIC),
        ("indirect CAS", |c, at| add(c, cas(Mode::Ge, at, WORDS[0], WORDS[1]).indirect()), ATOMIC | READ),
        ("CAS from memory", |c, at| add(c, cas_with::<[u8; 16]>(Mode::Le, at.plus(64), at)), ATOMIC | READ),
        ("CAS from scratch", |c, at| add(c, cas_with::<[u8; 16]>(Mode::Ge, at.plus(64), SCRATCH)), ATOMIC),
        (
            "CAS, its old value into memory",
            |c, at| add(c, cas(Mode::Ge, at.plus(64), WORDS[0], WORDS[1]).redirect(at.plus(128))),
            ATOMIC | WRITE,
        ),
        ("FETCH-ADD", |c, at| add(c, fetch_add(at.plus(64), &U64::ZERO)), ATOMIC),
        (
            "FETCH-ADD, its old value into memory",
            |c, at| add(c, fetch_add(at.plus(64), &U64::ZERO).redirect(at.plus(128))),
            ATOMIC | WRITE,
        ),
    ];
    let (node, all) = (Node::new(), [READ, WRITE, ATOMIC, ALLOCATE]);
    let class = Class::get(CLASS).expect("a class");
    let at = Addr::new(node.segment(0));
    let mut pointer = at.plus(64).raw().to_le_bytes().to_vec();
    pointer.extend(8u64.to_le_bytes());
    for (what, ask, asked) in rows {
        for bits in 0..16 {
            let rights: Rights = (0..4).filter(|bit| bits >> bit & 1 != 0).map(|bit| all[bit]).collect();
            node.memory.poke(at.raw(), &[0; 256]);
            node.memory.poke(at.raw(), &pointer);
            node.memory.limit_rights(rights);
            node.memory.take_touched();
            let free = free_list(&node.memory, 1, class);
            let opened = rights.contains(asked);
            let rest = if opened { Status::Ok } else { Status::Aborted };
            let statuses = node.ask(key(1), |chain| {
                ask(chain, at);
                let _ = chain.also(read(SCRATCH, 8));
            });
            assert_eq!(statuses, [expected(opened), rest], "{what} with the rights: {rights}");
            // If the key has the right ALLOCATE, a buffer is reserved even if the ALLOCATE's output is refused, and
            // then freed.
            let changed = !node.memory.take_touched().is_empty();
            assert!(opened || rights.contains(ALLOCATE) || !changed, "{what} with the rights: {rights}");
            let kept = free_list(&node.memory, 1, class).len() < free.len();
            assert!(opened || !kept, "{what} with the rights: {rights} keeps a buffer");
        }
    }
}

#[test]
fn retire_needs_allocate_and_a_reclaiming_cas_also_atomic() {
    let all = [Rights::READ, Rights::WRITE, Rights::ATOMIC, Rights::ALLOCATE];
    for bits in 0..16 {
        let rights: Rights = (0..4).filter(|bit| bits >> bit & 1 != 0).map(|bit| all[bit]).collect();
        let stage = |node: &Node| {
            let arena = Arena::of(&node.memory);
            let Ok(Some((_, buffer))) = arena.buffer_at(node.mine[0]) else { panic!("it is a buffer") };
            let Ok(state) = arena.state(&buffer);
            state.stage
        };
        let node = Node::new();
        node.memory.limit_rights(rights);
        let may = rights.contains(Rights::ALLOCATE);
        assert_eq!(node.one(retire(&[Addr::new(node.mine[0])])), expected(may), "{rights}");
        assert_eq!(stage(&node) == Stage::Retired, may, "{rights}");

        let node = Node::new();
        node.memory.limit_rights(rights);
        let slot = node.segment(0) + 256;
        node.memory.poke(slot, &node.mine[0].to_le_bytes());
        let may = rights.contains(Rights::ALLOCATE | Rights::ATOMIC);
        let swing = cas(Mode::Ne, Addr::new(slot), &[0u8; 8], &[0u8; 8]).reclaiming(0);
        assert_eq!(node.one(swing), expected(may), "{rights}");
        assert_eq!(stage(&node) == Stage::Retired, may, "{rights}");
    }
}

#[test]
fn retiring_ignores_all_but_live_buffers_of_the_chains_region() {
    let node = Node::new();
    let before = node.memory.all();
    let retired = node.mine[1];
    assert_eq!(node.one(retire(&[Addr::new(retired)])), Status::Ok);
    assert!(node.memory.all() != before);
    let Ok(given) = Arena::of(&node.memory).buffer_at(node.mine[0]);
    let (_, buffer) = given.expect("it is a buffer");
    let Ok(()) = Arena::of(&node.memory).give(1, &buffer);
    let before = node.memory.all();
    let own = node.mine.map(|at| [at, at + 1, at + 16, at + BUFFER - 16]).concat();
    let places = node.places().into_iter().map(|(_, at, _)| at);
    let hostile = [0, 1 << 63, u64::MAX, node.segment(4), node.segment(4) + 16, node.mine[1] + BUFFER];
    for at in places.chain(own.into_iter().chain(hostile).map(Addr::new)) {
        if at.raw() == node.other {
            continue; // A live buffer of another region: tested below.
        }
        assert_eq!(node.one(retire(&[at, at])), Status::Ok);
        assert!(node.memory.all() == before, "RETIRE of {at:?}");
        let slot = node.segment(0) + 256;
        node.memory.poke(slot, at.raw().to_le_bytes().as_slice());
        let planted = node.memory.all();
        assert_eq!(node.one(cas(Mode::Ne, Addr::new(slot), &[1u8; 8], &[2u8; 8]).reclaiming(0)), Status::Ok);
        node.memory.poke(slot, at.raw().to_le_bytes().as_slice());
        assert!(node.memory.all() == planted, "a CAS that unlinks {at:?}");
        node.memory.poke(0, &before);
    }
    assert_eq!(node.one(retire(&[Addr::new(node.other)])), Status::Ok);
    assert!(node.memory.all() == before, "a buffer of another region");
}

#[test]
fn an_indirect_access_needs_rights_to_pointer_and_pointee() {
    let node = Node::new();
    let mut cases = 0;
    for (where_, pointer_at, pointer_opened) in node.places() {
        for (what, pointee, pointee_opened) in node.places() {
            // The test writes pointers in memory; the chain itself writes pointers in scratch.
            let in_scratch = pointer_at.scratch_offset().is_some();
            let kept = if in_scratch {
                Vec::new()
            } else {
                node.memory.peek(pointer_at.raw().min((16 << 20) - 16), 16)
            };
            let mut pointer = [0; 16];
            pointer[..8].copy_from_slice(&pointee.raw().to_le_bytes());
            pointer[8..12].copy_from_slice(&8u32.to_le_bytes());
            // The node's records are left unchanged: their contents must not be followed anyway.
            let plant = !in_scratch && (pointer_opened || where_.contains("other's"));
            let ops: [(&str, AddOps); 4] = [
                ("READ", |chain, at| add(chain, read(at, 8).indirect())),
                ("bounded READ", |chain, at| add(chain, read(at, 8).indirect().bounded())),
                ("WRITE", |chain, at| add(chain, write(at, WORD).indirect())),
                ("CAS", |chain, at| add(chain, cas(Mode::Ge, at, &[0u8; 8], &[0u8; 8]).indirect())),
            ];
            for (op, ask) in ops {
                if plant {
                    node.memory.poke(pointer_at.raw(), &pointer);
                }
                node.memory.watch();
                let mut buf = ChainBuf::new();
                let mut chain = buf.begin(key(1));
                add(&mut chain, write(Addr::scratch(16), &pointer));
                ask(&mut chain, pointer_at);
                let mut reply = Reply::new();
                let Ok(()) = run(&node.memory, BY, chain.view(), &mut reply);
                let statuses: Vec<Status> = reply.statuses().collect();
                let opened = pointer_opened && pointee_opened;
                assert_eq!(statuses, [Status::Ok, expected(opened)], "{op} of {what} by {where_}");
                assert!(opened || !node.memory.has_changed(), "{op} of {what} by {where_} changed something");
                cases += 1;
            }
            if plant {
                node.memory.poke(pointer_at.raw(), &kept);
            }
            if pointee_opened && pointee.scratch_offset().is_none() {
                node.memory.poke(pointee.raw(), &[0u8; 16]);
            }
        }
    }
    println!("{cases} pairs of pointer and pointee");
}

#[test]
fn the_source_and_the_redirect_of_an_op_need_rights_too() {
    let node = Node::new();
    let own = Addr::new(node.segment(0));
    let mut cases = 0;
    for (what, second, second_opened) in node.places() {
        for (whose, first, first_opened) in node.places() {
            node.memory.watch();
            let ops: [(&str, AddOpsWith); 5] = [
                ("data-indirect WRITE", |chain, at, source| add(chain, write_from(at, source, 8))),
                ("data-indirect CAS", |chain, at, source| add(chain, cas_from(at, &[0xeeu8; 8], source))),
                ("redirected READ", |chain, at, to| add(chain, read(at, 8).redirect(to))),
                ("redirected CAS", |chain, at, to| {
                    add(chain, cas(Mode::Lt, at, &[0u8; 8], &[0u8; 8]).redirect(to));
                }),
                ("redirected FETCH-ADD", |chain, at, to| {
                    add(chain, fetch_add(at, &U64::ZERO).redirect(to));
                }),
            ];
            for (op, ask) in ops {
                let status = node.ask(key(1), |chain| ask(chain, first, second))[0];
                let opened = first_opened && second_opened;
                let done = matches!(status, Status::Ok | Status::CasFailed);
                assert_eq!(done, opened, "{op} of {whose} with {what}: {status:?}");
                assert!(done || status == Status::Access, "{op} of {whose} with {what}: {status:?}");
                assert!(
                    opened || !node.memory.has_changed(),
                    "{op} of {whose} with {what} changed something"
                );
                cases += 1;
            }
        }
        let before = free_list(&node.memory, 1, Class::get(CLASS).expect("a class")).len();
        let status = node.one(allocate(LIST, [WORD, b"", b""]).redirect(second));
        assert_eq!(status, expected(second_opened), "ALLOCATE redirected to {what}");
        if !second_opened {
            let after = free_list(&node.memory, 1, Class::get(CLASS).expect("a class")).len();
            assert!(after >= before, "a refused ALLOCATE frees its buffer");
        }
        node.memory.poke(own.raw(), &[0; 512]);
    }
    println!("{cases} pairs of places");
}

#[test]
fn any_other_key_is_refused() {
    let node = Node::new();
    let mine = Addr::new(node.segment(0));
    let keys = [
        ("wrong secret", Key::new(1, secret(1) ^ (1 << 63))),
        ("no secret", Key::new(1, 0)),
        ("the other region's", key(2)),
        ("own secret for the other region", Key::new(2, secret(1))),
        ("region 0", Key::new(0, secret(1))),
        ("region 0, no secret", Key::new(0, 0)),
        ("a region that was never opened", Key::new(9, 0)),
        ("the first region beyond the last", Key::new(256, secret(1))),
        ("region 1 but for the high bits", Key::new(1 + (1 << 16), secret(1))),
        ("the last number", Key::new(u32::MAX, secret(1))),
    ];
    let refused = |what: &str, key: Key| {
        node.memory.watch();
        let ops: [AddOps; 6] = [
            |chain, at| add(chain, read(at, 8)),
            |chain, at| add(chain, write(at, WORD)),
            |chain, at| add(chain, read(at, 8).indirect()),
            |chain, at| add(chain, cas(Mode::Ge, at, &[0u8; 8], &[1u8; 8])),
            |chain, at| add(chain, fetch_add(at, &U64::ZERO)),
            |chain, _| add(chain, allocate(LIST, [WORD, b"", b""])),
        ];
        // The other region's key does open its own lists.
        let ops = if key == crate::support::key(2) { &ops[..5] } else { &ops[..] };
        for (index, op) in ops.iter().enumerate() {
            let statuses = node.ask(key, |chain| {
                op(chain, mine);
                let _ = chain.also(read(Addr::scratch(0), 8));
            });
            assert_eq!(statuses, [Status::Access, Status::Aborted], "{what}, op {index}");
            assert!(!node.memory.has_changed(), "{what}, op {index} changed something");
        }
        // Ops that touch none of the node's memory need no right.
        let statuses = node.ask(key, |chain| {
            let _ = chain.also(read(mine, 0));
            let _ = chain.then(write(Addr::scratch(8), WORD));
        });
        assert_eq!(statuses, [Status::Ok, Status::Ok], "{what}");
    };
    for (what, key) in keys {
        refused(what, key);
    }
    assert_eq!(node.one(read(mine, 8)), Status::Ok);
    revoke(&node.memory, 1);
    refused("revoked", key(1));
    refused("revoked, no secret", Key::new(1, 0));
}

#[test]
fn region_0_reaches_no_memory_not_even_ungranted_segments() {
    let node = Node::new();
    let arena = Arena::of(&node.memory);
    let places = [node.segment(7) + SEGMENT_SIZE / 2, node.segment(7), node.segment(4), node.mine[0], 0];
    for at in places {
        let Ok(reach) = arena.reach(0, at, 8);
        assert_eq!(reach, 0, "{at:#x}");
    }
}

#[test]
fn a_direct_access_must_lie_within_one_buffer_or_table() {
    let node = Node::new();
    let [first, second] = node.mine;
    let segment = |index| node.segment(index);
    let end = 16 << 20;
    let cases: &[(&str, u64, u32, bool)] = &[
        ("a whole buffer", first, BUFFER as u32, true),
        ("one byte more", first, BUFFER as u32 + 1, false),
        ("a buffer's last byte", first + BUFFER - 1, 1, true),
        ("a buffer's last byte and the next", first + BUFFER - 1, 2, false),
        ("the end of one buffer and the beginning of the next", second - 8, 16, false),
        ("all of two buffers", first, 2 * BUFFER as u32, false),
        ("before the first buffer", first - 1, 1, false),
        ("before and into the first buffer", first - 1, 2, false),
        ("the states", segment(4), 16, false),
        ("two segments of one table", segment(1) - 100, 200, true),
        ("one table's end", segment(2) - 64, 64, true),
        ("one byte past a table, into another's", segment(2) - 64, 65, false),
        ("a table behind another's", segment(3), 64, true),
        ("another's table into one's own", segment(3) - 8, 16, false),
        ("a table into one's own buffers' states", segment(4) - 8, 16, false),
        ("64 KiB of a table", segment(0) + 5, 65536, true),
        ("64 KiB less one past a table's end", segment(2) - 65535, 65536, false),
        ("the last byte of memory", end - 1, 1, false),
        ("beyond memory", end, 8, false),
        ("a wrap round zero", u64::MAX - 7, 16, false),
        ("the highest scratch address", u64::MAX - 7, 8, false),
        ("the highest node address", (1 << 63) - 8, 8, false),
        ("from the highest node address into scratch", (1 << 63) - 8, 16, false),
        ("all of scratch", 1 << 63, 32, true),
        ("one byte past scratch", 1 << 63, 33, false),
        ("the last byte of scratch", (1 << 63) + 31, 1, true),
        ("past the last byte of scratch", (1 << 63) + 31, 2, false),
        ("behind scratch", (1 << 63) + 32, 1, false),
        ("no bytes of nothing", u64::MAX, 0, true),
        ("no bytes of null", 0, 0, true),
        ("no bytes of the header", 64, 0, true),
        ("null", 0, 1, false),
    ];
    static ZEROS: [u8; 65536] = [0; 65536];
    for &(what, at, len, opened) in cases {
        let at = Addr::new(at);
        // The READ is redirected to its own source, since the reply cannot hold 64 KiB.
        assert_eq!(node.one(read(at, len).redirect(at)), expected(opened), "READ {what}");
        node.memory.watch();
        if len < 65536 {
            let bytes = &ZEROS[..len as usize];
            assert_eq!(node.one(write(at, bytes)), expected(opened), "WRITE {what}");
        }
        let status = node.one(write_from(at, Addr::new(segment(0)), len));
        assert_eq!(status, expected(opened), "data-indirect WRITE {what}");
        assert!(opened || !node.memory.has_changed(), "{what} changed something");
    }
}

#[test]
fn an_indirect_access_ends_where_the_buffer_or_table_ends() {
    let node = Node::new();
    let slot = node.segment(3) + 64;
    let [first, second] = node.mine;
    let segment = |index| node.segment(index);
    let cases: &[(&str, u64, u32, Option<u64>)] = &[
        ("a whole buffer", first, 4096, Some(BUFFER)),
        ("the rest of a buffer", first + 100, 4096, Some(28)),
        ("less than a buffer", first, 16, Some(16)),
        ("the last byte", second - 1, 4096, Some(1)),
        ("two segments of a table", segment(1) - 8, 4096, Some(4096)),
        ("a table's end", segment(2) - 8, 4096, Some(8)),
        ("a table's end before buffers", segment(4) - 24, 4096, Some(24)),
        ("scratch", (1 << 63) + 30, 4096, Some(2)),
        ("behind scratch", (1 << 63) + 32, 4096, None),
        ("states", segment(4), 4096, None),
        ("the last state", first - 16, 4096, None),
        ("the highest address", u64::MAX, 4096, None),
        ("the highest node address", (1 << 63) - 1, 4096, None),
        ("null, with length 0", 0, 0, Some(0)),
    ];
    for &(what, pointee, len, reach) in cases {
        for bound in [None, Some(0), Some(1), Some(20), Some(u32::MAX)] {
            let mut pointer = pointee.to_le_bytes().to_vec();
            pointer.extend(bound.unwrap_or(3).to_le_bytes());
            pointer.extend([0xff; 4]); // The tag, which the node ignores.
            node.memory.poke(slot, &pointer);
            let asked = u64::from(len.min(bound.unwrap_or(u32::MAX)));
            let expected = if asked == 0 { Some(0) } else { reach.map(|reach| reach.min(asked)) };

            let mut buf = ChainBuf::new();
            let mut chain = buf.begin(key(1));
            let op = read(Addr::new(slot), len).indirect();
            let _ = chain.also(if bound.is_some() { op.bounded() } else { op });
            let mut reply = Reply::new();
            let Ok(()) = run(&node.memory, BY, chain.view(), &mut reply);
            let got = (reply.verdict() == Status::Ok).then(|| reply.output(0).len() as u64);
            assert_eq!(got, expected, "READ of {what}, bound {bound:?}");
            assert!(got.is_some() || reply.verdict() == Status::Access, "READ of {what}, bound {bound:?}");

            // A WRITE of the same length changes exactly the same bytes.
            let before = node.memory.all();
            let data = vec![0xa5; len as usize];
            let mut chain = buf.begin(key(1));
            let op = write(Addr::new(slot), &data).indirect();
            let _ = chain.also(if bound.is_some() { op.bounded() } else { op });
            let Ok(()) = run(&node.memory, BY, chain.view(), &mut reply);
            assert_eq!(reply.verdict() == Status::Ok, expected.is_some(), "WRITE of {what}, bound {bound:?}");
            let mut after = before.clone();
            if let (Some(len), true) = (expected, pointee < 16 << 20) {
                after[pointee as usize..(pointee + len) as usize].fill(0xa5);
            }
            assert!(node.memory.all() == after, "WRITE of {what}, bound {bound:?}");
            node.memory.poke(0, &before);
        }
    }
}

#[test]
fn a_word_must_be_aligned_to_its_width() {
    let node = Node::new();
    let base = node.segment(0);
    for (base, opened) in [(base, true), (1 << 63, true), (node.segment(2), false)] {
        for offset in 0..17 {
            let at = Addr::new(base + offset);
            let status = |aligned: bool| if aligned { expected(opened) } else { Status::Invalid };
            let (eight, sixteen) = (offset % 8 == 0, offset % 16 == 0);
            // Scratch has no wide words, even at aligned addresses.
            let wide = if base == 1 << 63 && offset == 0 { Status::Invalid } else { status(offset == 0) };
            assert_eq!(node.one(cas(Mode::Ge, at, &[0u8; 8], &[0u8; 8])), status(eight));
            assert_eq!(node.one(cas(Mode::Ge, at, &[0u8; 16], &[0u8; 16])), status(sixteen));
            assert_eq!(node.one(cas(Mode::Ge, at, &[0u8; 24], &[0u8; 24])), wide);
            assert_eq!(node.one(cas(Mode::Ge, at, &[0u8; 32], &[0u8; 32])), wide);
            assert_eq!(node.one(fetch_add(at, &U64::ZERO)), status(eight));
            assert_eq!(node.one(read(at, 0).indirect()), status(eight));
            assert_eq!(node.one(read(at, 0).indirect().bounded()), status(sixteen));
        }
    }
}

#[test]
fn wide_words_need_wide_memory_and_a_wrong_key_cannot_tell() {
    let node = Node::new();
    let at = Addr::new(node.segment(0));
    for (wide, status) in [(true, Status::Ok), (false, Status::Invalid)] {
        node.memory.set_wide(wide);
        for key in [key(1), Key::new(1, secret(1) ^ 1)] {
            let status = if key == crate::support::key(1) { status } else { Status::Access };
            assert_eq!(node.ask(key, |c| add(c, cas(Mode::Ge, at, &[0u8; 24], &[0u8; 24]))), [status]);
            assert_eq!(node.ask(key, |c| add(c, cas(Mode::Ge, at, &[0u8; 32], &[0u8; 32]))), [status]);
            let in_scratch =
                node.ask(key, |c| add(c, cas(Mode::Ge, Addr::scratch(0), &[0u8; 32], &[0u8; 32])));
            assert_eq!(in_scratch, [Status::Invalid]);
        }
        assert_eq!(node.one(cas(Mode::Ge, at, &[0u8; 16], &[0u8; 16])), Status::Ok);
    }
}

#[test]
fn the_status_of_an_op_decides_whether_the_next_runs() {
    let node = Node::new();
    let table = Addr::new(node.segment(0));
    let fail: AddOps = |chain, at| add(chain, cas(Mode::Ne, at, &[0u8; 8], &[0u8; 8]));
    let rows: [(Status, usize, AddOps, [Status; 2]); 8] = [
        (Status::Ok, 0, |chain, at| add(chain, read(at, 1)), [Status::Ok, Status::Ok]),
        (Status::CasFailed, 0, fail, [Status::Ok, Status::Skipped]),
        (
            Status::Skipped,
            1,
            |chain, at| {
                let _ = chain.also(cas(Mode::Ne, at, &[0u8; 8], &[0u8; 8]));
                let _ = chain.then(read(at, 1));
            },
            [Status::Ok, Status::Skipped],
        ),
        (
            Status::Aborted,
            1,
            |chain, at| {
                let _ = chain.also(read(Addr::new(64), 1));
                let _ = chain.also(read(at, 1));
            },
            [Status::Aborted, Status::Aborted],
        ),
        (
            Status::Access,
            0,
            |chain, _| add(chain, read(Addr::new(64), 1)),
            [Status::Aborted, Status::Aborted],
        ),
        (
            Status::NullPointer,
            0,
            |chain, _| add(chain, read(Addr::scratch(0), 1).indirect()),
            [Status::Ok, Status::Skipped],
        ),
        (
            Status::Invalid,
            0,
            |chain, at| add(chain, fetch_add(at.plus(1), &U64::ZERO)),
            [Status::Aborted, Status::Aborted],
        ),
        (Status::TooLong, 0, |chain, at| add(chain, read(at, 65536)), [Status::Ok, Status::Skipped]),
    ];
    for (status, index, build, [also, then]) in rows {
        let chain_of = |conditional: bool| {
            node.ask(key(1), |chain| {
                build(chain, table);
                let _ = if conditional { chain.then(read(table, 1)) } else { chain.also(read(table, 1)) };
                // Skipping continues along conditional ops, and stops at the first unconditional one.
                let _ = chain.then(read(table, 1));
                let _ = chain.also(read(table, 1));
            })
        };
        let last = if also == Status::Aborted { Status::Aborted } else { Status::Ok };
        assert_eq!(chain_of(false)[index..], [status, also, also, last], "after {status:?}");
        assert_eq!(chain_of(true)[index..], [status, then, then, last], "after {status:?}, conditional");
    }
    // NOT READY concerns the whole chain: none of its ops runs.
    let before = node.memory.all();
    let statuses = node.ask(key(1), |chain| {
        let _ = chain.also(write(table, WORD));
        let _ = chain.also(allocate(LIST, [WORD, b"", b""]));
        let _ = chain.then(allocate(ListId(40), [WORD, b"", b""]));
        let _ = chain.also(read(table, 1));
    });
    assert_eq!(statuses, [Status::NotReady; 4]);
    let table_of = |memory: &[u8]| memory[2 << 20..][..SEGMENT_SIZE as usize].to_vec();
    assert!(table_of(&node.memory.all()) == table_of(&before), "a chain that is not ready does nothing");
    assert_eq!(free_list(&node.memory, 1, Class::get(CLASS).expect("a class")).len(), 1);
}
