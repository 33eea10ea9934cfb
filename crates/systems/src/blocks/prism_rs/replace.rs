//! Replacement of a replica: the way back for a replica that lost its memory, and the way to another node.
//!
//! Configuration k is a list of 2f + 1 members, and k + 1 is the next list, with a newcomer in the place of one member.
//! A recoverer, which is a client, makes five steps:
//!
//! 1. *Fill*: prepare the newcomer under k + 1, and install in it what k has, while k serves reads and writes.
//! 2. *Decide* on the list of k + 1 in the register of k's members (module `members::configuration`). If the list of
//!    another recoverer is decided, go on with that one, and drop the own newcomer.
//! 3. *Revoke* k's keys at f + 1 members of k. From here on k serves nothing.
//! 4. *Level*: read the tags at these f + 1 members, and bring each block's highest to f + 1 members of k + 1. Likewise
//!    the highest writer id.
//! 5. *Enable* k + 1 at its members, each by itself. Each gives clients its key of k + 1 from then on.
//!
//! A recoverer that finds k + 1 enabled at one member skips to the rest of step 5. Recoverers may die anywhere, and
//! several may run at the same time: each step may be repeated, and none is undone. Clients that are refused find k + 1
//! and go on with it (module `replica`).
//!
//! Why no write is lost and no read is stale:
//! * A write that k has acknowledged is at f + 1 members of k, so at one of the f + 1 that step 4 reads. It was there
//!   before the revocation was answered, and step 4 reads later. So its tag, or a higher one, is at f + 1 members of
//!   k + 1 before any client gets a key of k + 1. If the tags were read before the revocation, a write might be
//!   acknowledged between the two, at the members that were read, and be missed.
//! * *Each* recoverer revokes at the members that *it* reads. If it relied on another one's revocations, which may be
//!   at other members, one of its own f + 1 could still take a write of k.
//! * A phase of a client that ends under k + 1 counts acknowledgements of k + 1 only. Up to f members of k that have
//!   acknowledged a write may be ones that step 4 did not read, or that were replaced. Added up with members of k + 1,
//!   they are a majority of neither list.
//! * Two lists for k + 1 would share too few members: two majorities of different lists need not meet. So the list is
//!   decided before anything is revoked, and an own newcomer that lost is never enabled.
//! * A replica that lost its memory counts nowhere before step 5. Acknowledgements that it gave before are lost with
//!   its memory, and a majority that includes it may have no other member that knows the write.
//! * A claim of a writer id that k has completed has raised the highest id of one of the f + 1 members read, hence that
//!   of a majority of k + 1, so no client of k + 1 claims the same id. A claim that is not complete is given up.
//! * Step 4 compares tags first, and reads a block afterwards. If the member that has it dies in between, the tags of
//!   the others are no longer those of f + 1 members that were read: restart at step 3.
//!
//! Enabling waits for no chains: a chain of k that still runs at a member which step 3 did not revoke is one of at most
//! f, so it completes no phase of k. What it installs has its tag, and is a write that runs.
//!
//! A replaced member is dropped when all members of the current list were seen to serve it. If a member had missed
//! that, it would know the replaced one as a member, and its absence would mean that the store was dropped.
//!
//! Invariant: a list is revoked for, levelled and enabled only if it was decided.
//! Invariant: a newcomer is dropped only if its list lost.

use super::layout::Tag;
use super::level::{Copied, Needed, Pace, READS, Site, level, newest_tags};
use super::mutants;
use super::service::PrismRsKind;
use crate::blocks::BlocksError;
use crate::members::configuration::View;
use crate::members::{MemberId, Place};
use crate::store::{Members, StoreError, fetch};
use farside_remote::clock::Clock;
use farside_remote::control::{MemberState, Membership};
use farside_remote::draws::Draws;
use farside_remote::{Fabric, NodeId};
use std::collections::BTreeSet;
use std::time::Duration;

/// Number of times that steps 3 and 4 are tried until their error is returned.
const ROUNDS: u32 = 8;
/// Pause after the first failure of steps 3 and 4. Each further pause is twice as long.
const PAUSE: Duration = Duration::from_millis(2);

/// Options of a replacement.
pub struct ReplaceOptions<'a> {
    /// Random number of this recoverer, drawn anew for each.
    pub entropy: u64,
    /// Maximum number of bytes per second that step 1 copies; `None` for no limit. Later steps have no limit.
    pub bytes_per_second: Option<u64>,
    /// Called in step 1 with the number of blocks that were compared so far, and the number of all blocks.
    pub progress: &'a mut dyn FnMut(u64, u64),
}

/// What a replacement did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replaced {
    /// Number of the store's configuration now.
    pub configuration: u64,
    /// What was copied while the store was in use.
    pub filled: Copied,
    /// What was copied while clients waited.
    pub levelled: Copied,
}

/// Replaces member `index` of the store that `members` describe by node `by`, whether that member is lost, unreachable
/// or alive. If node `by` holds this member already, only completes what other recoverers left unfinished.
///
/// # Errors
/// [`StoreError`]; the store is as correct as before. If too many members do not answer once k is revoked, clients wait
/// until a recoverer reaches them.
pub async fn replace<'a, F: Fabric + Clock>(
    fabric: &'a F,
    members: &'a Members,
    index: usize,
    by: NodeId,
    options: ReplaceOptions<'a>,
) -> Result<Replaced, StoreError> {
    let mut recoverer = Recoverer::new(fabric, members, options)?;
    recoverer.complete().await?;
    let view = View::of(fabric, members).await?;
    recoverer.replace(view, index, by).await
}

/// Completes unfinished replacements, and replaces each member whose node has lost its memory by that node. Returns a
/// sentence for each repair.
///
/// # Errors
/// [`StoreError`]; the store is as correct as before. A majority may have lost its memory.
pub(super) async fn heal<F: Fabric + Clock>(
    fabric: &F,
    members: &Members,
    entropy: u64,
) -> Result<Vec<String>, StoreError> {
    let options = ReplaceOptions { entropy, bytes_per_second: None, progress: &mut |_, _| () };
    let mut recoverer = Recoverer::new(fabric, members, options)?;
    let mut repairs = Vec::new();
    loop {
        if let Some(configuration) = recoverer.complete().await? {
            repairs
                .push(format!("completed the replacement of a member: configuration {configuration} serves"));
        }
        let view = View::of(fabric, members).await?;
        let Some((index, by)) = view.begun().map_or_else(|| wiped(&view), |begun| Ok(Some(begun)))? else {
            return Ok(repairs);
        };
        let (had_lost, before) = (matches!(view.places[index], Place::Lost(_)), view.configuration);
        let Replaced { configuration, filled, levelled } = match recoverer.replace(view, index, by).await {
            Ok(replaced) => replaced,
            // Another recoverer was first.
            Err(_) if View::of(fabric, members).await?.configuration > before => continue,
            Err(error) => return Err(error),
        };
        repairs.push(format!(
            "replaced member {index}{} by node {}: {} blocks copied, {} of them while clients waited; configuration \
             {configuration} serves",
            if had_lost { ", which had lost its memory," } else { "" },
            by.0,
            filled.blocks + levelled.blocks,
            levelled.blocks
        ));
    }
}

/// Returns the first member whose node has another memory, with that node.
///
/// # Errors
/// A majority has lost its memory; or a member has, and it is not certain which node held it.
fn wiped(view: &View) -> Result<Option<(usize, NodeId)>, StoreError> {
    let Some((index, node)) = view.lost().next() else { return Ok(None) };
    if view.places.len() - view.lost().count() < view.majority() {
        return Err(view.majority_lost(index, node));
    }
    match view.returned() {
        Some(wiped) => Ok(Some(wiped)),
        None => Err(StoreError::Gone(format!(
            "member {index} of store '{}' has lost its memory, and which node held it is not certain: choose a node \
             without a member, and name it in 'farside volume replace --replica {index} --by'",
            view.name
        ))),
    }
}

/// A client that replaces members.
struct Recoverer<'a, F> {
    fabric: &'a F,
    members: &'a Members,
    /// Draws the number of each decision.
    numbers: Draws,
    pace: Pace<'a>,
}

impl<'a, F: Fabric + Clock> Recoverer<'a, F> {
    fn new(
        fabric: &'a F,
        members: &'a Members,
        options: ReplaceOptions<'a>,
    ) -> Result<Recoverer<'a, F>, StoreError> {
        members.check_kind::<PrismRsKind>()?;
        let ReplaceOptions { entropy, bytes_per_second, progress } = options;
        let pace = Pace { reads: 1, bytes_per_second, progress };
        Ok(Recoverer { fabric, members, numbers: Draws(entropy), pace })
    }

    /// Draws the number of a decision.
    fn number(&mut self) -> u64 {
        let before = self.numbers.clone();
        let number = self.numbers.next();
        if mutants::BALLOT_REUSED.is_on() {
            self.numbers = before;
        }
        number
    }

    /// Completes a replacement that is decided or may be, and drops members that were replaced. Returns the number of
    /// the configuration if anything was completed.
    async fn complete(&mut self) -> Result<Option<u64>, StoreError> {
        let mut completed = None;
        for _ in 0..ROUNDS {
            let mut view = View::of(self.fabric, self.members).await?;
            let is_behind = view.places.iter().any(|place| matches!(place, Place::Behind(_)));
            if is_behind {
                let (configuration, list) = (view.configuration, view.members.clone());
                if view.enable_all(self.fabric, configuration, &list).await? > 0 {
                    completed = Some(configuration);
                    view = View::of(self.fabric, self.members).await?;
                }
            }
            let is_revoked =
                view.places.iter().any(|place| matches!(place, Place::Holds(_, MemberState::Revoked)));
            let Some(accepted) = view.last_accepted() else {
                if is_revoked {
                    // The members that have accepted the next configuration do not answer.
                    return Err(StoreError::BeingReplaced { name: view.name });
                }
                view.drop_others(self.fabric).await;
                return Ok(completed);
            };
            let proposal = accepted.members.clone();
            // A single accepted list proves nothing: run the ballot.
            let Some(list) = view.decide(self.fabric, &proposal, self.number()).await? else {
                continue;
            };
            let (configuration, _) = self.finish(&view, &list).await?;
            completed = Some(configuration);
        }
        Ok(completed)
    }

    /// Makes the five steps.
    async fn replace(&mut self, view: View, index: usize, by: NodeId) -> Result<Replaced, StoreError> {
        let Some(incarnation) = view.incarnation(by) else {
            return Err(StoreError::Gone(format!(
                "node {} does not answer, so it replaces no member of store '{}': check that it runs and is in --pool",
                by.0, view.name
            )));
        };
        if index >= view.members.len() {
            return Err(StoreError::Gone(format!(
                "store '{}' has no member {index}: give a number from 0 to {}",
                view.name,
                view.members.len() - 1
            )));
        }
        let (filled, levelled) = (Copied::default(), Copied::default());
        match view.members.iter().position(|member| member.incarnation == incarnation) {
            None => {}
            Some(held) if held == index => {
                return Ok(Replaced { configuration: view.configuration, filled, levelled });
            }
            Some(held) => {
                return Err(StoreError::Gone(format!(
                    "node {} has replaced no member of store '{}': it holds member {held} already; choose a node \
                     without a member",
                    by.0, view.name
                )));
            }
        }
        // Nobody could tell any more which node that member is to return to.
        let is_anothers = |(other, place): (usize, &Place)| {
            other != index
                && view.members[other].node == by.0
                && matches!(place, Place::Lost(_) | Place::Silent(_))
        };
        if let Some(lost) = view.places.iter().enumerate().position(is_anothers) {
            return Err(StoreError::Gone(format!(
                "node {} has replaced no member of store '{}': it probably held member {lost}, and has lost that \
                 memory; let it return with 'farside heal' first, or choose another node",
                by.0, view.name
            )));
        }
        let mut list = view.members.clone();
        list[index] = MemberId { node: by.0, incarnation };
        let membership = Membership {
            attempt: view.attempt,
            state: MemberState::Joining,
            index: index as u32,
            configuration: view.configuration + 1,
            members: list.clone(),
        };
        view.join_by(self.fabric, self.members, by, &membership).await?;
        let filled = if mutants::AMNESIAC_VOTES.is_on() { filled } else { self.fill(&view, by).await? };
        let Some(decided) = view.decide(self.fabric, &list, self.number()).await? else {
            return Err(StoreError::BeingReplaced { name: view.name });
        };
        let goes_on = if mutants::TWO_CONFIGURATIONS.is_on() { &list } else { &decided };
        let (configuration, levelled) = self.finish(&view, goes_on).await?;
        if decided == list {
            return Ok(Replaced { configuration, filled, levelled });
        }
        view.leave(self.fabric, by, &membership).await;
        Err(StoreError::Gone(format!(
            "node {} has replaced no member of store '{}', since another replacement was completed first: \
             configuration {configuration} serves; look at the store's members, and repeat the request if it is still \
             needed",
            by.0, view.name
        )))
    }

    /// Step 1, second half: installs in the newcomer what k has, while k serves. What is missed is copied in step 4.
    async fn fill(&mut self, view: &View, by: NodeId) -> Result<Copied, StoreError> {
        let part = view.revoke(self.fabric, &[by], |_| false).await.pop();
        let newcomer = match part {
            Some(Ok(part)) => Site::new(self.fabric, self.members, &part)?.with_roles(false, true),
            Some(Err((_, error))) => return Err(error),
            None => return Ok(Copied::default()),
        };
        let mut sites = self.of_clients(view).await;
        if sites.is_empty() {
            // Another recoverer has revoked k meanwhile.
            return Ok(Copied::default());
        }
        sites.push(newcomer);
        let needed = Needed { sources: 1, targets: 1 };
        match level(self.fabric, &mut sites, needed, &mut self.pace, None).await {
            Ok(copied) => Ok(copied),
            // Each replica has the same quota. A full one may lack blocks that the others have.
            Err(BlocksError::OutOfMemory) => Err(StoreError::Gone(format!(
                "the blocks of store '{}' do not fit into a new replica at node {}, whose quota is {} MiB as that of \
                 each other: nothing was lost; copy the blocks to a volume with a larger --quota",
                view.name,
                by.0,
                view.store.quota >> 20
            ))),
            // The sources may have been revoked or have died. Steps 2 and 3 find out.
            Err(_) => Ok(Copied::default()),
        }
    }

    /// The members of k that give clients a key, as sources.
    async fn of_clients(&self, view: &View) -> Vec<Site> {
        let mut sites = Vec::new();
        for node in view.holders() {
            let session = self.fabric.session_number(node);
            let Ok(store) = fetch(self.fabric, node, &view.name).await else { continue };
            let is_of_view = store
                .membership
                .as_ref()
                .is_some_and(|of| (of.attempt, of.configuration) == (view.attempt, view.configuration));
            let part = Members::part(node, session, store);
            if let Ok(site) = Site::new(self.fabric, self.members, &part)
                && is_of_view
            {
                sites.push(site.with_roles(true, false));
            }
        }
        sites
    }

    /// Steps 3 to 5, for a list that was decided. Returns the number of the configuration, and what was copied.
    async fn finish(&mut self, of: &View, list: &[MemberId]) -> Result<(u64, Copied), StoreError> {
        let next = of.configuration + 1;
        let mut error = StoreError::BeingReplaced { name: of.name.clone() };
        for round in 0..ROUNDS {
            if round > 0 {
                self.fabric.sleep(PAUSE * (1 << round)).await;
            }
            let view = View::of(self.fabric, self.members).await?;
            let levelled = match view.configuration >= next {
                // One member of k + 1 serves it, so steps 3 and 4 were completed.
                true => Copied::default(),
                false if mutants::AMNESIAC_VOTES.is_on() => Copied::default(),
                false => match self.revoke_and_level(&view, list).await {
                    Ok(levelled) => levelled,
                    Err(failure) => {
                        error = failure;
                        continue;
                    }
                },
            };
            // If a member serves k + 1 already, its list is the decided one.
            let (configuration, list) = match view.configuration >= next {
                true => (view.configuration, &view.members[..]),
                false => (next, list),
            };
            let enabled = view.enable_all(self.fabric, configuration, list).await;
            let view = View::of(self.fabric, self.members).await?;
            if view.configuration >= next {
                view.drop_others(self.fabric).await;
                return Ok((view.configuration, levelled));
            }
            error = enabled.err().unwrap_or(error);
        }
        Err(error)
    }

    /// Steps 3 and 4.
    async fn revoke_and_level(&mut self, view: &View, list: &[MemberId]) -> Result<Copied, StoreError> {
        let holders: BTreeSet<u32> = view.holders().iter().map(|node| node.0).collect();
        let next: BTreeSet<u32> =
            list.iter().filter_map(|member| view.node_of(member)).map(|node| node.0).collect();
        let early = match mutants::READ_BEFORE_REVOCATION.is_on() {
            true => newest_tags(self.fabric, &mut self.of_clients(view).await).await.ok(),
            false => None,
        };
        let count =
            |nodes: &[NodeId], of: &BTreeSet<u32>| nodes.iter().filter(|node| of.contains(&node.0)).count();
        let majority = view.majority();
        let ids = |nodes: &mut dyn Iterator<Item = &u32>| nodes.map(|node| NodeId(*node)).collect::<Vec<_>>();
        // First, before clients wait: a newcomer only gives its key. It has what step 1 has copied. Without it, the
        // others might need these blocks from each other while clients wait.
        let newcomers = ids(&mut next.difference(&holders));
        let joined = view.revoke(self.fabric, &newcomers, |_| false).await;
        let given: Vec<NodeId> = joined.iter().flatten().map(|part| part.list()[0].node).collect();
        let is_enough = |revoked: &[NodeId]| {
            count(revoked, &holders) >= majority && count(revoked, &next) + given.len() >= majority
        };
        let revoked = view.revoke(self.fabric, &ids(&mut holders.iter()), is_enough).await;
        let (mut sites, mut failure) = (Vec::new(), None);
        for part in revoked.into_iter().chain(joined) {
            match part {
                Ok(part) => {
                    let site = Site::new(self.fabric, self.members, &part)?;
                    let (is_source, is_target) =
                        (holders.contains(&site.node.0), next.contains(&site.node.0));
                    sites.push(site.with_roles(is_source, is_target));
                }
                Err((_, error)) => failure = Some(error),
            }
        }
        let revoked: Vec<NodeId> =
            sites.iter().map(|site| site.node).filter(|node| holders.contains(&node.0)).collect();
        if !is_enough(&revoked) {
            return Err(failure.unwrap_or_else(|| StoreError::BeingReplaced { name: view.name.clone() }));
        }
        let needed = Needed { sources: majority, targets: majority };
        let mut unlimited = Pace { reads: READS, bytes_per_second: None, progress: &mut |_, _| () };
        let early: Option<&[Tag]> = early.as_deref();
        level(self.fabric, &mut sites, needed, &mut unlimited, early).await.map_err(|error| match error {
            BlocksError::Store(error) => error,
            BlocksError::Fabric(error) => StoreError::Fabric(error),
            other => StoreError::Gone(format!(
                "the newest blocks of store '{}' could not be brought to a majority: {other}; retry with \
                 'farside heal'",
                view.name
            )),
        })
    }
}
