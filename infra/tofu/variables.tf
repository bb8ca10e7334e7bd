# What is validated here is what a plan should already refuse: names, the
# repository, ports and durations. All the rest is judged by `toad check`, over
# the directories that the outputs name.

variable "home" {
  description = "The toad user's home directory, or any directory to render to."
  type        = string
  default     = "/home/toad"

  validation {
    condition     = startswith(var.home, "/") && !can(regex("[[:space:][:cntrl:]]", var.home))
    error_message = "home must be an absolute path without spaces."
  }
}

variable "image" {
  description = "Toad's own image, by digest, where the host can pull it again."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9.-]+(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+@sha256:[0-9a-f]{64}$", var.image))
    error_message = "image must be REGISTRY/REPOSITORY@sha256:DIGEST."
  }
}

variable "flags" {
  description = "Flags of `toad serve` by name, without the dashes; a list's values are separated by commas. Those that toad.container and its mounts decide are not among them."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for name, _ in var.flags : contains(["auth-file", "ca-file", "listen", "plain-http", "reserved", "web-listen"], name)])
    error_message = "flags knows auth-file, ca-file, listen, plain-http, reserved and web-listen."
  }
  validation {
    condition     = alltrue([for _, value in var.flags : !can(regex("[\"\\\\$%[:cntrl:]]", value))])
    error_message = "A flag's value is without quotes, backslashes, $, % and control characters."
  }
}

variable "page_host" {
  description = "The public host name of the read-only page, which the gateway answers to; without one there is no gateway."
  type        = string
  default     = null

  validation {
    condition     = var.page_host == null || can(regex("^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", var.page_host))
    error_message = "page_host must be a host name in lower case, without scheme and port."
  }
}

variable "networks" {
  description = "The services' networks, by name. options are further lines of the Quadlet's [Network] section."
  type = map(object({
    options = optional(list(string), [])
  }))
  default = {}

  validation {
    condition     = alltrue([for name, _ in var.networks : can(regex("^[a-z0-9][a-z0-9_-]*$", name)) && name != "toad"])
    error_message = "A network's name is of a-z, 0-9, _ and -, and not toad, which is Toad's own."
  }
  validation {
    condition     = alltrue(flatten([for _, n in var.networks : [for o in n.options : can(regex("^[A-Za-z0-9]+=[^[:cntrl:]]*$", o))]]))
    error_message = "An option of a network is one line KEY=VALUE."
  }
}

variable "services" {
  description = "The enrolled services, by identifier."
  type = map(object({
    description = optional(string)
    unit        = optional(string) # of the Quadlet; default: NAME.container
    repository  = string           # where its images come from, without tag and digest
    image_limit = optional(string, "4GiB")

    readiness = object({ # how it is asked whether it is ready, without any client
      port     = number
      path     = optional(string, "/")
      network  = string # one of var.networks; Toad joins it, too
      host     = optional(string)
      scheme   = optional(string)
      insecure = optional(bool)
      status   = optional(number)
      interval = optional(string, "1s")
      timeout  = optional(string, "2s")
    })
    probation = optional(object({
      rollout_deadline = optional(string, "2m")
      stability_window = optional(string, "30s")
      restart_budget   = optional(number, 1)
      startup_deadline = optional(string)
    }), {})
    fetch_deadline = optional(string, "10m")
    stop_seconds   = optional(number, 8) # from SIGTERM to SIGKILL; the other stop times follow from it
    barrier        = optional(bool, false)

    start_at_boot     = optional(bool, true)
    networks          = optional(list(string), []) # beside that of readiness
    publish           = optional(list(string), []) # PublishPort=
    volumes           = optional(list(string), [])
    secrets           = optional(list(string), []) # references to Podman's secrets, never values
    environment       = optional(map(string), {}) # the container sees each value as it is here
    environment_files = optional(list(string), [])
    read_only         = optional(bool, true)
    capabilities      = optional(list(string), [])      # all others are dropped
    extra             = optional(map(list(string)), {}) # further lines, by section
  }))
  default = {}

  validation {
    condition     = alltrue([for name, _ in var.services : can(regex("^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$", name)) && !startswith(name, "toad-")])
    error_message = "A service's identifier is 1 to 40 of a-z, 0-9 and inner hyphens, and does not begin with toad-, as Toad's own units do."
  }
  validation {
    condition     = alltrue([for _, s in var.services : s.unit == null || can(regex("^[a-z0-9][a-z0-9_-]*\\.container$", s.unit))])
    error_message = "unit must be a plain file name NAME.container of a-z, 0-9, _ and -."
  }
  validation {
    condition     = alltrue([for _, s in var.services : can(regex("^(localhost|[a-z0-9-]+(\\.[a-z0-9-]+)+|[a-z0-9.-]+:[0-9]{1,5})(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+$", s.repository))])
    error_message = "repository must be REGISTRY/PATH in lower case, without tag and digest."
  }
  validation {
    condition     = alltrue([for _, s in var.services : s.readiness.port >= 1 && s.readiness.port <= 65535 && floor(s.readiness.port) == s.readiness.port])
    error_message = "readiness.port must be a whole number from 1 to 65535."
  }
  validation {
    condition = alltrue(flatten([for _, s in var.services : [
      for n in concat([s.readiness.network], s.networks) : can(regex("^[a-z0-9][a-z0-9_-]*$", n)) && n != "toad"
    ]]))
    error_message = "A network is named as in networks, without .network, and is not toad, which is Toad's own."
  }
  validation {
    condition = alltrue(flatten([for _, s in var.services : [
      for d in [
        s.readiness.interval, s.readiness.timeout, s.fetch_deadline,
        s.probation.rollout_deadline, s.probation.stability_window, s.probation.startup_deadline
      ] : d == null || can(regex("^([0-9]+(\\.[0-9]+)?(ms|s|m|h))+$", d)) && can(regex("[1-9]", d))
    ]]))
    error_message = "A duration is above 0 and of numbers with ms, s, m or h: 30s, 1m30s."
  }
  validation {
    condition     = alltrue([for _, s in var.services : s.stop_seconds >= 1 && s.stop_seconds <= 3600 && floor(s.stop_seconds) == s.stop_seconds])
    error_message = "stop_seconds must be a whole number from 1 to 3600."
  }
  validation {
    condition     = alltrue([for _, s in var.services : can(regex("^[0-9]+([KMGT]iB)?$", s.image_limit))])
    error_message = "image_limit is a number of bytes, or one of KiB, MiB, GiB, TiB: 4GiB."
  }
  validation {
    condition     = alltrue(flatten([for _, s in var.services : [for k, _ in s.environment : can(regex("^[A-Za-z_][A-Za-z0-9_]*$", k))]]))
    error_message = "The name of an environment variable is of letters, digits and _."
  }
  validation {
    condition     = alltrue(flatten([for _, s in var.services : [for section, _ in s.extra : contains(["Unit", "Container", "Service", "Install"], section)]]))
    error_message = "extra knows the sections Unit, Container, Service and Install."
  }
  validation { # a line more would be a line of the unit's
    condition = alltrue(flatten([for _, s in var.services : [
      for v in concat([coalesce(s.description, "-")], s.publish, s.volumes, s.secrets, values(s.environment),
      s.environment_files, s.capabilities, flatten(values(s.extra))) : !can(regex("[[:cntrl:]]", v)) && !endswith(v, "\\")
    ]]))
    error_message = "What goes into a unit is one line, without control characters and a backslash at its end."
  }
}
