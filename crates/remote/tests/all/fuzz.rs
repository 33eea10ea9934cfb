//! Fuzz targets of the wire formats: chains and replies. Seeds come from the real builders.
//!
//! Property: bytes that decode are well-formed to the last byte. Iterating over the decoded chain and encoding it again
//! gives the same bytes, and nothing panics.

#[path = "../support/fuzz.rs"]
mod driver;

use driver::{Change, Executions, budget, change};
use farside_remote::op::{self, ListId, Mode};
use farside_remote::wire::{CHAIN_BYTES_MAX, OPS_MAX, REPLY_BYTES_MAX};
use farside_remote::{Addr, ChainBuf, ChainView, Key, Reply};

/// Encoded chains such as systems build, as seeds.
fn chains() -> Vec<Vec<u8>> {
    let mut buffer = ChainBuf::new();
    let mut all = Vec::new();
    let (key, at) = (Key::new(3, 7), Addr::new(4096));
    let (value, addend) = ([7; 700], 1.into());
    let garbage = [Addr::new(1 << 21), Addr::new(64)];
    for kind in 0..8 {
        let mut chain = buffer.begin(key);
        match kind {
            0 => {
                let _item = chain.also(op::read(at, 600).indirect().bounded());
            }
            1 => {
                let _written = chain.also(op::write(Addr::scratch(8), &[1; 8]));
                let fill = op::allocate(ListId(3), [&value, &[2; 9], &[]]);
                let _new = chain.then(fill.redirect(Addr::scratch(0)));
                let _old = chain.then(op::cas_from(at, &5_u128, Addr::scratch(0)));
                let _seen = chain.also(op::read(Addr::scratch(0), 16));
            }
            2 => {
                let _old = chain.also(op::cas(Mode::Lt, at, &1_u64, &2_u64).masked(&3_u64, &4_u64));
            }
            3 => {
                let _old = chain.also(op::fetch_add(at, &addend));
            }
            4 => {
                let _new = chain.also(op::allocate(ListId(3), [&value, &[], &[]]).redirect(Addr::scratch(8)));
                let swing = op::cas_from(at, &[5_u8; 32], Addr::scratch(0)).masked(&[1; 32], &[2; 32]);
                let _old = chain.then(swing.indirect().reclaiming(8));
                let _retired = chain.then(op::retire(&garbage));
            }
            5 => {
                let _retired = chain.also(op::retire(&[]));
                let _old = chain.also(op::cas(Mode::Lt, at, &1_u64, &2_u64).reclaiming(0));
            }
            6 => {
                let _item = chain.also(op::read(at, 600));
                let _seen = chain.also(op::read(at, 8).fenced());
                let _old = chain.also(op::cas(Mode::Ge, at, &1_u64, &2_u64).fenced());
                let _sum = chain.also(op::fetch_add(at, &addend).fenced());
                let _written = chain.also(op::write(at, &[1; 8]).fenced());
            }
            _ => {
                for n in 0..OPS_MAX as u64 {
                    let _word = chain.also(op::read(at.plus(n * 8), 8));
                }
            }
        }
        let mut bytes = Vec::new();
        chain.write_to(&mut bytes);
        all.push(bytes);
    }
    all
}

fn is_whole(bytes: &[u8]) {
    let Ok((chain, rest)) = ChainView::decode(bytes) else { return };
    assert_eq!(chain.wire_len() + rest.len(), bytes.len());
    assert!(chain.wire_len() <= CHAIN_BYTES_MAX && (1..=OPS_MAX).contains(&chain.len()));
    assert_eq!(chain.ops().count(), chain.len());
    let mut again = Vec::new();
    chain.write_to(&mut again);
    assert_eq!(again, bytes[..chain.wire_len()]);
    farside_remote::hints(chain, |_| {});
}

#[test]
fn fuzz_modified_chains() {
    let (seeds, executions) = (chains(), Executions::of("modified chains"));
    seeds.iter().for_each(|seed| assert!(ChainView::decode(seed).is_ok(), "a seed is valid"));
    bolero::check!().with_test_time(budget()).with_type().cloned().for_each(
        |(seed, changes): (u8, Vec<Change>)| {
            executions.one_more();
            let mut bytes = seeds[usize::from(seed) % seeds.len()].clone();
            change(&mut bytes, &changes);
            is_whole(&bytes);
        },
    );
}

#[test]
fn fuzz_arbitrary_bytes_as_chains() {
    let executions = Executions::of("arbitrary bytes as chains");
    bolero::check!().with_test_time(budget()).for_each(|bytes: &[u8]| {
        executions.one_more();
        is_whole(bytes);
    });
}

#[test]
fn fuzz_replies() {
    let executions = Executions::of("replies");
    let good = |ops: usize| {
        let entries = (1..=ops as u32).flat_map(|op| [[0; 4], (op * 8).to_le_bytes()].concat());
        entries.chain(vec![5; ops * 8]).collect::<Vec<u8>>()
    };
    Reply::new().decode(3, &good(3)).expect("a seed is valid");
    let inputs = bolero::check!().with_test_time(budget()).with_type().cloned();
    inputs.for_each(|(ops, claimed, changes): (u8, u8, Vec<Change>)| {
        executions.one_more();
        let mut bytes = good(usize::from(ops) % OPS_MAX);
        change(&mut bytes, &changes);
        let mut reply = Reply::new();
        let claimed = if claimed < 128 { usize::from(ops) % OPS_MAX } else { usize::from(claimed) };
        if reply.decode(claimed, &bytes).is_ok() {
            assert_eq!(reply.as_bytes(), bytes);
            assert!(bytes.len() <= REPLY_BYTES_MAX);
            let _any = (claimed > 0).then(|| reply.last_status());
        }
    });
}
