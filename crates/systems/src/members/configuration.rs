//! Changes of the configuration of a store whose members can be replaced, as requests to its members: a look at all of
//! them, the register that decides on the next configuration, and the requests that revoke and enable.
//!
//! The register is one of Paxos, with a single decision. The members of configuration k are its acceptors, and the
//! recoverers its proposers. A list of members for k + 1 is *decided* when f + 1 of 2f + 1 members have accepted it
//! with the same ballot. Then it stays decided: f + 1 members can promise a higher ballot only if one of them has
//! accepted this list, and the proposer must propose the list that was accepted with the highest ballot.
//!
//! Invariant: a list that was accepted by fewer members proves nothing. Its proposer's ballot, or another one, must be
//! completed first.
//! Invariant: a member that lost its memory is not an acceptor, since its node has another incarnation and no store of
//! this attempt in this configuration.
//! Invariant: no two proposals have the same ballot. So each call of [`View::decide`] has a number of its own, also if
//! the same recoverer makes it: what it proposed before may have been accepted, at a member that does not answer now.

use super::requests::{ask, not_understood, raw_ask};
use super::survey::Survey;
use super::{MemberId, Place, all, wait_for};
use crate::store::{Loss, Members, StoreError};
use farside_remote::clock::Clock;
use farside_remote::control::{
    Accepted, Answer, Ask, Attempt, Ballot, MemberState, Membership, ROUND_MAX, Register, Store,
};
use farside_remote::{Fabric, NodeId};
use std::time::Duration;

/// Pause after a ballot that another proposer has outbid. Each pause is twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(2);
/// Number of ballots of one proposer, until it reports that others interfere.
const BALLOTS: u32 = 8;

/// What the nodes of a pool say about the members of a store.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) name: String,
    pub(crate) attempt: Attempt,
    /// Number of the current configuration.
    pub(crate) configuration: u64,
    /// Members of the current configuration.
    pub(crate) members: Vec<MemberId>,
    /// Where the members are, by index.
    pub(crate) places: Vec<Place>,
    /// Nodes with other members: those that were replaced, and newcomers.
    pub(crate) others: Vec<(NodeId, Membership)>,
    /// What the members of the current configuration have accepted for the next one.
    pub(crate) accepted: Vec<Accepted>,
    /// Description of the store at one of its members, without a key.
    pub(crate) store: Store,
    /// Incarnation of the memory of each node that answered.
    incarnations: Vec<Option<u64>>,
}

impl View {
    /// Looks at the members of the store that `members` describe, in whatever configuration it is.
    ///
    /// # Errors
    /// The store was dropped, or no node that knows it has answered.
    pub(crate) async fn of<F: Fabric>(fabric: &F, members: &Members) -> Result<View, StoreError> {
        let known = members.store();
        let Some(of) = &known.membership else {
            return Err(StoreError::Gone(format!(
                "store '{}' lies on one node, so no member of it can be replaced: copy it to another store",
                known.name
            )));
        };
        let survey = Survey::ask(fabric, members.nodes(), &known.name).await?;
        let of_attempt = |store: &&Store| {
            let own = store.membership.as_ref();
            own.is_some_and(|own| own.attempt == of.attempt && own.state != MemberState::Joining)
        };
        let mut stores = survey.found.iter().flatten().filter_map(|found| found.store.as_ref());
        let Some(store) = stores.find(of_attempt).cloned() else { return Err(survey.absent()) };
        let group = survey.group(of);
        let accepted = group.places.iter().filter_map(|place| match place {
            Place::Holds(node, _) => survey.found[node.0 as usize].as_ref().ok()?.accepted.clone(),
            _ => None,
        });
        Ok(View {
            accepted: accepted.collect(),
            name: known.name.clone(),
            attempt: of.attempt,
            configuration: group.configuration,
            members: group.members,
            places: group.places,
            others: group.others,
            store,
            incarnations: survey.found.iter().map(|found| Some(found.as_ref().ok()?.incarnation)).collect(),
        })
    }

    /// Number of members that are a majority.
    pub(crate) fn majority(&self) -> usize {
        self.members.len() / 2 + 1
    }

    /// Nodes of the members that serve or have served the current configuration.
    pub(crate) fn holders(&self) -> Vec<NodeId> {
        self.places
            .iter()
            .filter_map(|place| match place {
                Place::Holds(node, _) => Some(*node),
                _ => None,
            })
            .collect()
    }

    /// Incarnation of the memory of a node that answered.
    pub(crate) fn incarnation(&self, node: NodeId) -> Option<u64> {
        self.incarnations.get(node.0 as usize).copied().flatten()
    }

    /// Node that has this incarnation of its memory, if it answered.
    pub(crate) fn node_of(&self, member: &MemberId) -> Option<NodeId> {
        let node = self.incarnations.iter().position(|found| *found == Some(member.incarnation))?;
        Some(NodeId(node as u32))
    }

    /// The list that was accepted with the highest ballot. It need not be decided.
    pub(crate) fn last_accepted(&self) -> Option<&Accepted> {
        self.accepted.iter().max_by_key(|accepted| accepted.ballot)
    }

    /// Error of a store of which a majority has lost its memory, and so the member with this index.
    pub(crate) fn majority_lost(&self, index: usize, node: NodeId) -> StoreError {
        let (name, member, loss) = (self.name.clone(), index as u32, Loss::Majority);
        StoreError::MemoryLost { name, member, node, loss }
    }

    /// Error of a replacement for which too few members answer.
    fn no_majority(&self, answered: usize, reason: Option<StoreError>) -> StoreError {
        let needed = self.majority();
        StoreError::Gone(format!(
            "no member of store '{}' was replaced: {answered} of its members answered, and {needed} are needed: retry \
             when more of its nodes are reachable{}",
            self.name,
            reason.map_or_else(String::new, |reason| format!("; {reason}"))
        ))
    }

    /// Decides which members the next configuration has. Proposes `proposal`, and returns the list that is decided,
    /// which may be that of another recoverer; `None` if the current configuration is over. `number` is random and new:
    /// no other call has it.
    ///
    /// # Errors
    /// Too few members answered, or other recoverers interfere. The list may be decided later.
    pub(crate) async fn decide<F: Fabric + Clock>(
        &self,
        fabric: &F,
        proposal: &[MemberId],
        number: u64,
    ) -> Result<Option<Vec<MemberId>>, StoreError> {
        let mut round = self.last_accepted().map_or(0, |accepted| accepted.ballot[0]) + 1;
        let (holders, configuration) = (self.holders(), self.configuration + 1);
        let (name, attempt) = (&self.name, self.attempt);
        for ballots in 0..BALLOTS {
            let ballot = [round, number];
            let name = || name.clone();
            let promise = Ask::Promise { name: name(), attempt, configuration, ballot };
            let promises = self.acceptors(fabric, &holders, &promise).await?;
            let Some(promises) = promises else { return Ok(None) };
            let kept = promises.iter().filter(|register| register.promised == ballot);
            let mut highest = promises.iter().map(|register| register.promised).max().unwrap_or(ballot);
            if kept.clone().count() >= self.majority() {
                let accepted = kept.filter_map(|register| register.accepted.as_ref());
                let binding = accepted.max_by_key(|accepted| accepted.ballot);
                let members = binding.map_or(proposal, |accepted| &accepted.members).to_vec();
                let accept =
                    Ask::Accept { name: name(), attempt, configuration, ballot, members: members.clone() };
                let accepts = self.acceptors(fabric, &holders, &accept).await?;
                let Some(accepts) = accepts else { return Ok(None) };
                let accepted = Accepted { ballot, members };
                let is_accepted = |register: &&Register| register.accepted.as_ref() == Some(&accepted);
                if accepts.iter().filter(is_accepted).count() >= self.majority() {
                    return Ok(Some(accepted.members));
                }
                highest = accepts.iter().map(|register| register.promised).fold(highest, Ballot::max);
            }
            round = highest[0].max(round) + 1;
            if round > ROUND_MAX {
                break;
            }
            // Proposers that outbid each other wait for different times.
            fabric.sleep(PAUSE * (1 << ballots) + Duration::from_micros(number % 4096)).await;
        }
        Err(StoreError::BeingReplaced { name: name.clone() })
    }

    /// Whether an acceptor can have this state. A node may answer anything.
    fn is_possible(&self, register: &Register) -> bool {
        let is_of_store = |accepted: &Accepted| accepted.members.len() == self.members.len();
        register.check().is_ok() && register.accepted.as_ref().is_none_or(is_of_store)
    }

    /// Sends a request to all acceptors. Returns the answers, or `None` if an acceptor has left the configuration.
    async fn acceptors<F: Fabric>(
        &self,
        fabric: &F,
        holders: &[NodeId],
        request: &Ask,
    ) -> Result<Option<Vec<Register>>, StoreError> {
        let answers = all(holders.iter().map(|node| ask(fabric, *node, request))).await;
        let (mut registers, mut failure, mut is_refused) = (Vec::new(), None, false);
        for (node, answer) in holders.iter().zip(answers) {
            match answer {
                Ok(Answer::Register(register)) if self.is_possible(&register) => registers.push(register),
                Ok(_) => failure = Some(not_understood(*node)),
                Err(error) => {
                    is_refused |= matches!(error, StoreError::Gone(_));
                    failure = Some(error);
                }
            }
        }
        match registers.len() >= self.majority() {
            true => Ok(Some(registers)),
            false if is_refused => Ok(None),
            false => Err(self.no_majority(registers.len(), failure)),
        }
    }

    /// The replacement that another recoverer has begun and that is not decided: the index, and the newcomer's node.
    pub(crate) fn begun(&self) -> Option<(usize, NodeId)> {
        self.others.iter().find_map(|(node, of)| {
            let is_next = of.state == MemberState::Joining && of.configuration == self.configuration + 1;
            let mut changed = of
                .members
                .iter()
                .zip(&self.members)
                .enumerate()
                .filter(|(_, (a, b))| a.incarnation != b.incarnation);
            let (index, _) = changed.next()?;
            let is_one = changed.next().is_none() && of.members.len() == self.members.len();
            (is_next && is_one && of.index as usize == index).then_some((index, *node))
        })
    }

    /// The members whose nodes have another memory: their indices, and these nodes.
    pub(crate) fn lost(&self) -> impl Iterator<Item = (usize, NodeId)> {
        self.places.iter().enumerate().filter_map(|(index, place)| match place {
            Place::Lost(node) => Some((index, *node)),
            _ => None,
        })
    }

    /// The first lost member whose node is certain. A node at another place in the pool may be another node.
    pub(crate) fn returned(&self) -> Option<(usize, NodeId)> {
        self.lost().find(|&(index, node)| self.members[index].node == node.0)
    }

    /// Whether all members serve the current configuration, except the one that `newcomer` is to replace.
    fn others_serve(&self, newcomer: &Membership) -> bool {
        self.places.iter().zip(0..).all(|(place, index)| index == newcomer.index || serves(place))
    }

    /// Prepares the newcomer on node `by`, unless another recoverer has.
    ///
    /// # Errors
    /// The node refused, has too little memory, or did not answer.
    pub(crate) async fn join_by<F: Fabric>(
        &self,
        fabric: &F,
        members: &Members,
        by: NodeId,
        membership: &Membership,
    ) -> Result<(), StoreError> {
        let held = self.others.iter().find(|(node, _)| *node == by).map(|(_, held)| held);
        match held {
            Some(held) if held == membership => return Ok(()),
            // A newcomer whose list lost never served. A replaced member is dropped once all others were seen to serve:
            // one that had missed that would know the replaced one as a member, and its absence would mean a drop.
            Some(held)
                if held.configuration <= self.configuration
                    && (held.state == MemberState::Joining || self.others_serve(membership)) =>
            {
                self.leave(fabric, by, held).await;
            }
            Some(_) => {
                return Err(StoreError::Gone(format!(
                    "node {} is to replace another member of store '{}', or was one: complete that with 'farside heal' \
                     first",
                    by.0, self.name
                )));
            }
            None => {}
        }
        match self.join(fabric, by, membership).await {
            Ok(()) => Ok(()),
            Err(error) => {
                // Another recoverer may have prepared the same newcomer, or the answer was lost.
                let view = View::of(fabric, members).await?;
                let is_there = view.others.iter().any(|(node, held)| *node == by && held == membership);
                match error {
                    _ if is_there => Ok(()),
                    StoreError::Gone(reason) => Err(StoreError::Gone(format!(
                        "node {} cannot hold a member of store '{}' in the place of member {}: {reason}",
                        by.0, view.name, membership.index
                    ))),
                    error => Err(error),
                }
            }
        }
    }

    /// Prepares a newcomer on `node`, with this membership. Clients get no key to it yet.
    ///
    /// # Errors
    /// The node refused, has too little memory, or did not answer.
    pub(crate) async fn join<F: Fabric>(
        &self,
        fabric: &F,
        node: NodeId,
        membership: &Membership,
    ) -> Result<(), StoreError> {
        let Store { name, kind, parameters, quota, .. } = self.store.clone();
        let membership = membership.clone();
        let request = Ask::PrepareStore { name, kind, parameters, quota, membership: membership.clone() };
        match ask(fabric, node, &request).await? {
            Answer::Store(store)
                if store.membership == Some(membership) && store.parameters == self.store.parameters =>
            {
                Ok(())
            }
            _ => Err(not_understood(node)),
        }
    }

    /// Revokes the current configuration's key at the members on `nodes`, at the same time, and returns the parts with
    /// the recoverers' key: as soon as `is_enough` of those that have answered, or when all have answered. A newcomer
    /// only gives its key. The member on a node is one of configuration k, or joins k + 1.
    pub(crate) async fn revoke<F: Fabric>(
        &self,
        fabric: &F,
        nodes: &[NodeId],
        is_enough: impl Fn(&[NodeId]) -> bool,
    ) -> Vec<Result<Members, (NodeId, StoreError)>> {
        let (name, attempt) = (self.name.clone(), self.attempt);
        let request = &Ask::Revoke { name, attempt, configuration: self.configuration };
        let asked = nodes.iter().map(|&node| async move {
            let session = fabric.session_number(node);
            match ask(fabric, node, request).await {
                Ok(Answer::Store(store)) if self.is_for_recoverers(node, &store) => {
                    Ok(Members::part(node, session, store))
                }
                Ok(_) => Err((node, not_understood(node))),
                Err(error) => Err((node, error)),
            }
        });
        let is_enough = |answers: &[Option<Result<Members, (NodeId, StoreError)>>]| {
            let revoked = answers.iter().flatten().flatten().map(|part| part.list()[0].node);
            is_enough(&revoked.collect::<Vec<_>>())
        };
        wait_for(asked, is_enough).await.into_iter().flatten().collect()
    }

    fn is_for_recoverers(&self, node: NodeId, store: &Store) -> bool {
        let is_member = |of: &Membership| {
            let is_possible = match of.state {
                MemberState::Revoked => of.configuration == self.configuration,
                MemberState::Joining => of.configuration == self.configuration + 1,
                _ => false,
            };
            is_possible && of.attempt == self.attempt && of.check(store.incarnation).is_ok()
        };
        store.name == self.name
            && self.incarnation(node) == Some(store.incarnation)
            && store.parameters == self.store.parameters
            && store.membership.as_ref().is_some_and(is_member)
    }

    /// Lets the member on `node` serve a configuration.
    ///
    /// # Errors
    /// The node refused or did not answer.
    pub(crate) async fn enable<F: Fabric>(
        &self,
        fabric: &F,
        node: NodeId,
        configuration: u64,
        members: &[MemberId],
    ) -> Result<(), StoreError> {
        let (name, attempt, members) = (self.name.clone(), self.attempt, members.to_vec());
        match ask(fabric, node, &Ask::Enable { name, attempt, configuration, members }).await? {
            Answer::Done => Ok(()),
            _ => Err(not_understood(node)),
        }
    }

    /// Drops the member with this membership on `node`. Returns whether it is dropped.
    pub(crate) async fn leave<F: Fabric>(&self, fabric: &F, node: NodeId, membership: &Membership) -> bool {
        let request = Ask::Leave { name: self.name.clone(), membership: membership.clone() };
        matches!(raw_ask(fabric, node, &request).await, Ok(Answer::Done))
    }

    /// Lets the members of a decided configuration serve it, at the same time, since one may not answer. Returns the
    /// number of members that do.
    ///
    /// # Errors
    /// None does: the error of the last one.
    pub(crate) async fn enable_all<F: Fabric>(
        &self,
        fabric: &F,
        configuration: u64,
        list: &[MemberId],
    ) -> Result<usize, StoreError> {
        let nodes = list.iter().filter_map(|member| self.node_of(member));
        let enabled = all(nodes.map(|node| self.enable(fabric, node, configuration, list))).await;
        let count = enabled.iter().filter(|enabled| enabled.is_ok()).count();
        match enabled.into_iter().find_map(Result::err) {
            Some(error) if count == 0 => Err(error),
            _ => Ok(count),
        }
    }

    /// Drops the members that were replaced, and the newcomers whose lists lost, once all members serve the current
    /// configuration.
    pub(crate) async fn drop_others<F: Fabric>(&self, fabric: &F) {
        if !self.places.iter().all(serves) {
            return;
        }
        for (node, held) in &self.others {
            if held.configuration <= self.configuration {
                self.leave(fabric, *node, held).await;
            }
        }
    }
}

/// Whether a member serves the current configuration.
fn serves(place: &Place) -> bool {
    matches!(place, Place::Holds(_, MemberState::Committed))
}
