//! Greetings: a HELLO opens a session, or is refused.
//!
//! Invariant: a response to a HELLO is not longer than the HELLO.
//! Invariant: a client's older session ends before the server welcomes the client to the new one.

use super::super::packet::{
    self, Datagram, Foreign, HelloBytes, Kind, PacketError, VERSION, WelcomeBytes, chunk,
};
use super::super::{DATAGRAM_MAX, DATAGRAM_MIN, REASON_BYTES_MAX, TOKEN_BYTES_MAX};
use super::session::{Session, Slot};
use super::{Address, End, Hello, Host, Server};
use crate::mutants;
use std::time::Duration;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

impl<A: Address, H: Host> Server<A, H> {
    pub(super) fn hello(
        &mut self,
        now: Duration,
        from: A,
        datagram: &Datagram<'_>,
        len: usize,
        host: &mut H,
    ) -> Result<(), PacketError> {
        if len < DATAGRAM_MIN {
            return Err(PacketError::Length);
        }
        let (fixed, rest) = HelloBytes::ref_from_prefix(datagram.body).map_err(|_| PacketError::Length)?;
        let token = rest.get(..fixed.token.get() as usize).ok_or(PacketError::Length)?;
        let asked = fixed.datagram.get() as usize;
        if token.len() > TOKEN_BYTES_MAX {
            return Err(PacketError::Field("token"));
        }
        if !(DATAGRAM_MIN..=DATAGRAM_MAX).contains(&asked) {
            return Err(PacketError::Field("limit of datagrams"));
        }
        let hello = Hello {
            identity: fixed.identity.get(),
            incarnation: fixed.incarnation.get(),
            features: fixed.features.get(),
            token,
        };
        let nonce = datagram.secret;
        let said = &datagram.body[..size_of::<HelloBytes>() + token.len()];
        let old = self.by_identity.get(&hello.identity).copied();
        if let Some(session) = old.and_then(|index| self.sessions[index].as_ref())
            && session.incarnation == hello.incarnation
        {
            if session.address == from && packet::same_bytes(&session.hello, said) {
                self.counters.duplicates += 1;
                let welcome = self.welcome(session, nonce);
                self.send_outside(from, welcome);
            } else {
                self.refuse(
                    from,
                    nonce,
                    "this incarnation of the client has a session; say hello with a higher one",
                );
            }
            return Ok(());
        }
        let live = old.and_then(|index| self.sessions[index].as_ref()).map(|session| session.incarnation);
        let ended = self.tombstones.iter().filter(|tombstone| tombstone.identity == hello.identity);
        if let Some(latest) = ended.map(|tombstone| tombstone.incarnation).chain(live).max()
            && latest >= hello.incarnation
        {
            let reason = format!(
                "incarnation {} of the client is over: this node has seen {latest}; say hello with a higher one",
                hello.incarnation
            );
            self.refuse(from, nonce, &reason);
            return Ok(());
        }
        if hello.features & !self.config.features != 0 {
            let reason = format!(
                "the client asks for features {:#x}, this node has {:#x}; use a node and a client of one release",
                hello.features, self.config.features
            );
            self.refuse(from, nonce, &reason);
            return Ok(());
        }
        let is_full = self.sessions() == self.config.sessions_max;
        if is_full && old.is_none() {
            self.expire(now, host);
            if self.sessions() == self.config.sessions_max {
                let reason =
                    format!("this node has {} sessions and grants no more", self.config.sessions_max);
                self.refuse(from, nonce, &reason);
                return Ok(());
            }
        }
        let opened = match host.open(&hello) {
            Ok(opened) => opened,
            Err(reason) => {
                self.refuse(from, nonce, &reason);
                return Ok(());
            }
        };
        // The old session ends before the response to the new one is sent, so none of its chains runs after the client
        // has received that response.
        if let Some(index) = old.filter(|_| !mutants::OLD_SESSION_LIVES.is_on()) {
            self.end(index, End::Replaced, host);
        }
        let secret = host.secret();
        let index = self.vacant(host);
        let generation = self.generations[index].wrapping_add(1);
        self.generations[index] = generation;
        let datagram = asked.min(self.config.datagram).min(self.config.credit());
        let chunk = chunk(datagram);
        let inbound = fixed.inbound.get() as usize;
        let session = Box::new(Session {
            number: u32::from(generation) << 16 | index as u32,
            address: from,
            secret,
            identity: hello.identity,
            incarnation: hello.incarnation,
            hello: said.into(),
            host: opened,
            datagram,
            chunk,
            eager: (inbound / self.config.window / datagram).clamp(1, 64),
            heard: now,
            executions: 0,
            assembling: 0,
            is_dirty: false,
            pong: false,
            has_long_replies: false,
            has_long_responses: false,
            send_have: 0,
            send_reply: 0,
            slots: (0..self.config.window).map(|_| Slot::new()).collect(),
        });
        let welcome = self.welcome(&session, nonce);
        self.by_identity.insert(session.identity, index);
        self.sessions[index] = Some(session);
        self.counters.opened += 1;
        self.send_outside(from, welcome);
        Ok(())
    }

    /// Returns the index of a free place. Adds a place if all are taken.
    fn vacant(&mut self, host: &mut H) -> usize {
        if let Some(index) = self.sessions.iter().position(Option::is_none) {
            return index;
        }
        self.sessions.push(None);
        // The value is random, so that a session of an earlier run of the node is not mistaken for one of this run.
        self.generations.push(host.secret() as u16);
        self.sessions.len() - 1
    }

    fn welcome(&self, session: &Session<A, H::Session>, nonce: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        packet::begin(&mut bytes, Kind::Welcome, 0, nonce);
        let welcome = WelcomeBytes {
            secret: U64::new(session.secret),
            node: U64::new(self.config.node),
            features: U64::new(self.config.features),
            session: U32::new(session.number),
            datagram: U32::new(session.datagram as u32),
            credit: U32::new(self.config.credit() as u32),
            assembly: U32::new(self.config.assembly_bytes as u32),
            silence_ms: U32::new(u32::try_from(self.config.silence.as_millis()).unwrap_or(u32::MAX)),
            window: self.config.window as u8,
            eager: session.eager as u8,
            reserved: U16::ZERO,
        };
        bytes.extend_from_slice(welcome.as_bytes());
        bytes
    }

    /// Refuses a session to the client whose HELLO has this nonce.
    pub fn refuse(&mut self, to: A, nonce: u64, reason: &str) {
        self.counters.refused += 1;
        let mut bytes = Vec::new();
        packet::begin(&mut bytes, Kind::Refused, 0, nonce);
        // The limit may cut a character in two; the client decodes the text leniently.
        bytes.extend_from_slice(&reason.as_bytes()[..reason.len().min(REASON_BYTES_MAX)]);
        self.send_outside(to, bytes);
    }

    pub(super) fn refuse_version(&mut self, to: A, bytes: &[u8]) {
        // Only a datagram of the size of a HELLO is answered, so that the response is never longer than the datagram.
        if let Some(foreign) = Foreign::decode(bytes)
            && foreign.kind == Kind::Hello as u8
            && bytes.len() >= DATAGRAM_MIN
        {
            let reason = format!(
                "the client speaks version {} of datagram sessions, this node speaks {VERSION}; use a node and a \
                 client of one release",
                foreign.version
            );
            self.refuse(to, foreign.secret, &reason);
        }
    }
}
