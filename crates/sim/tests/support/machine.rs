//! A machine that runs litmus programs: send queues, and a scheduler that draws the next event.
//!
//! The machine implements the contract as a hand-written list: for each event, the verbs that must be done before it.
//! The machine shares no code with the enumerator. Each flaw is one that a NIC, or a model of a NIC, may have.

use farside_sim::litmus::{LINE_WORDS, Op, Outcome, Program, Start, Step};
use farside_sim::random::Random;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    None,
    /// The lines of one WRITE land in any order, as relaxed ordering allows.
    WriteLinesInAnyOrder,
    // The following flaws are too weak: each produces a forbidden outcome.
    WritesPassWrites,
    ReadsPassWrites,
    AtomicsPassWrites,
    ReadsPassAtomics,
    AtomicsOverlap,
    FencesAreIgnored,
    FencesHoldOnlyThemselves,
    WaitsAreIgnored,
    FailedCasWritesBack,
    LinesAreTorn,
    /// A masked CAS merges its bits with the word at write-back, not with the word that it has fetched.
    MaskedSwapKeepsOtherBits,
    // The following flaws are too strong: each misses an allowed outcome.
    ReadLinesAscend,
    ReadsAreWhole,
    WritesAreWhole,
    ReadsKeepTheirOrder,
    AtomicsKeepTheirOrder,
    ReadsHoldWrites,
    AtomicsAreWhole,
    AtomicsExcludeWordsBeside,
    OneVerbAtATime,
}

/// Verb that has started and is not done.
struct Running<'a> {
    actor: usize,
    step: &'a Step,
    /// Ranges of words that have not been accessed yet, one per line, in ascending order.
    left: Vec<(usize, usize)>,
    answer: Vec<u64>,
    /// Whether the verb is an atomic that has fetched its word but not written it back. Until then it locks the NIC's
    /// slot for this address.
    holds_slot: bool,
}

impl Running<'_> {
    fn is_done(&self) -> bool {
        self.left.is_empty()
    }

    fn is_atomic(&self) -> bool {
        matches!(self.step.op, Op::Cas { .. } | Op::Faa { .. })
    }

    fn is_write(&self) -> bool {
        matches!(self.step.op, Op::Write { .. })
    }

    fn is_read(&self) -> bool {
        matches!(self.step.op, Op::Read { .. })
    }
}

pub(crate) fn run(program: &Program, seed: u64, flaw: Flaw) -> Outcome {
    let random = Random::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x5eed);
    let mut memory = program.memory();
    let mut all: Vec<Running<'_>> =
        program.steps().map(|(actor, step)| running(actor, step, flaw, &random)).collect();
    // Every second run ranks the lines of all verbs, which reaches outcomes that are rare with independent draws.
    let ranks: Option<Vec<u64>> =
        seed.is_multiple_of(2).then(|| (0..all.len() * 8).map(|_| random.bits()).collect());
    loop {
        let choices: Vec<(usize, usize)> =
            (0..all.len()).flat_map(|verb| (0..all[verb].left.len()).map(move |part| (verb, part))).collect();
        let mut choices: Vec<(usize, usize)> =
            choices.into_iter().filter(|&(verb, part)| may_act(&all, verb, part, flaw)).collect();
        if choices.is_empty() {
            break;
        }
        let chosen = match &ranks {
            Some(ranks) => {
                let rank = |&(verb, part): &(usize, usize)| {
                    let phase = if all[verb].is_atomic() { usize::from(all[verb].holds_slot) } else { 0 };
                    ranks[verb * 8 + phase * 4 + all[verb].left[part].0 / LINE_WORDS]
                };
                choices.sort_by_key(rank);
                choices[0]
            }
            None => choices[random.below(choices.len() as u64) as usize],
        };
        act(&mut all[chosen.0], chosen.1, &mut memory, flaw);
    }
    assert!(all.iter().all(Running::is_done), "every verb completes: {program}");
    Outcome { answers: all.into_iter().map(|verb| verb.answer).collect(), memory }
}

fn running<'a>(actor: usize, step: &'a Step, flaw: Flaw, random: &Random) -> Running<'a> {
    let (at, end) = (step.op.at(), step.op.at() + step.op.words());
    let mut left = Vec::new();
    let mut from = at;
    while from < end {
        let line_end = (from / LINE_WORDS + 1) * LINE_WORDS;
        let whole = match flaw {
            Flaw::ReadsAreWhole => matches!(step.op, Op::Read { .. }),
            Flaw::WritesAreWhole => matches!(step.op, Op::Write { .. }),
            _ => false,
        };
        let is_torn = flaw == Flaw::LinesAreTorn && random.one_in(2);
        let to = if whole {
            end
        } else if is_torn {
            from + 1
        } else {
            line_end
        };
        left.push((from, to.min(end)));
        from = to;
    }
    Running { actor, step, left, answer: vec![0; step.op.answer_words()], holds_slot: false }
}

/// Whether the part `part` of the verb `verb` may run now.
fn may_act(all: &[Running<'_>], verb: usize, part: usize, flaw: Flaw) -> bool {
    let this = &all[verb];
    if this.holds_slot {
        return true;
    }
    let before = || all[..verb].iter().filter(|other| other.actor == this.actor && !other.is_done());
    // In the sender's queue: has the verb been sent?
    for posted in (0..=verb).filter(|&posted| all[posted].actor == this.actor) {
        let mut earlier = all[..posted].iter().filter(|other| other.actor == this.actor && !other.is_done());
        let is_held = match all[posted].step.start {
            Start::AtOnce => false,
            Start::Waits => flaw != Flaw::WaitsAreIgnored && earlier.next().is_some(),
            Start::Fenced if flaw == Flaw::FencesAreIgnored => false,
            Start::Fenced if flaw == Flaw::FencesHoldOnlyThemselves && posted != verb => false,
            Start::Fenced => earlier.any(|other| !other.is_write()),
        };
        if is_held {
            return false;
        }
    }
    // At the responder: has each earlier verb that this verb must not overtake been done?
    let passes_writes = match this.step.op {
        Op::Read { .. } => flaw == Flaw::ReadsPassWrites,
        Op::Write { .. } => flaw == Flaw::WritesPassWrites,
        Op::Cas { .. } | Op::Faa { .. } => flaw == Flaw::AtomicsPassWrites,
    };
    if !passes_writes && before().any(Running::is_write) {
        return false;
    }
    if this.is_read() && flaw != Flaw::ReadsPassAtomics && before().any(Running::is_atomic) {
        return false;
    }
    let is_held = match flaw {
        Flaw::ReadsKeepTheirOrder => this.is_read() && before().any(Running::is_read),
        Flaw::AtomicsKeepTheirOrder => this.is_atomic() && before().any(Running::is_atomic),
        Flaw::ReadsHoldWrites => this.is_write() && before().any(Running::is_read),
        Flaw::OneVerbAtATime => before().next().is_some(),
        _ => false,
    };
    if is_held {
        return false;
    }
    // Within the verb: the order of its lines, and the slots of words.
    let ascends = match this.step.op {
        Op::Read { .. } => flaw == Flaw::ReadLinesAscend,
        Op::Write { .. } => flaw != Flaw::WriteLinesInAnyOrder,
        Op::Cas { .. } | Op::Faa { .. } => {
            let slot = |at: usize| if flaw == Flaw::AtomicsExcludeWordsBeside { 0 } else { at };
            let is_taken =
                |other: &Running<'_>| other.holds_slot && slot(other.step.op.at()) == slot(this.step.op.at());
            return flaw == Flaw::AtomicsOverlap || !all.iter().any(is_taken);
        }
    };
    !ascends || part == 0
}

fn act(verb: &mut Running<'_>, part: usize, memory: &mut [u64], flaw: Flaw) {
    let (from, to) = verb.left[part];
    let at = verb.step.op.at();
    match verb.step.op {
        Op::Read { .. } => verb.answer[from - at..to - at].copy_from_slice(&memory[from..to]),
        Op::Write { .. } => memory[from..to].copy_from_slice(&verb.step.op.payload()[from - at..to - at]),
        Op::Cas { compare, masks: [compared, _], .. } if !verb.holds_slot => {
            let old = memory[at];
            verb.answer[0] = old;
            let differs = (0..64).any(|bit| compared >> bit & 1 == 1 && (old ^ compare) >> bit & 1 == 1);
            verb.holds_slot = !differs || flaw == Flaw::FailedCasWritesBack;
        }
        Op::Faa { .. } if !verb.holds_slot => {
            verb.answer[0] = memory[at];
            verb.holds_slot = true;
        }
        Op::Cas { compare, swap, masks: [compared, swapped], .. } => {
            let old = verb.answer[0];
            let beside = if flaw == Flaw::MaskedSwapKeepsOtherBits { memory[at] } else { old };
            let (mut new, mut equal) = (0, true);
            for bit in (0..64).map(|place| 1 << place) {
                new |= if swapped & bit != 0 { swap & bit } else { beside & bit };
                equal &= compared & bit == 0 || old & bit == compare & bit;
            }
            memory[at] = if equal { new } else { old };
            verb.holds_slot = false;
        }
        Op::Faa { add, .. } => {
            memory[at] = verb.answer[0].wrapping_add(add);
            verb.holds_slot = false;
        }
    }
    if !verb.holds_slot {
        verb.left.remove(part);
    } else if flaw == Flaw::AtomicsAreWhole {
        act(verb, part, memory, flaw);
    }
}
