# Toad's own units, its services' networks and their enrollments, as files in the
# toad user's home. The units of the services are not among them: they are
# Toad's, in QUADLETS/<service>, where nothing of this is ever written.

terraform {
  required_version = ">= 1.8"
  required_providers {
    local = {
      source  = "hashicorp/local"
      version = ">= 1.4.0"
    }
  }
}

locals {
  quadlets   = "${var.home}/.config/containers/systemd"
  enrollment = "${var.home}/.config/toad/enrollment"

  # A file that cannot be read takes the units of its directory along, so each
  # has one of its own. No service can have the name _infra.
  own   = [for f in fileset("${path.module}/..", "*.{container,network}") : f if f != "toad-gateway.container" || var.page_host != null]
  infra = "${local.quadlets}/_infra"

  probed = distinct([for _, s in var.services : s.readiness.network])
  additions = { # to the units beside this module
    "toad.container" = concat(
      [for n in sort(local.probed) : "Network=${n}.network"],
      [for name, value in var.flags : "Environment=\"TOAD_${upper(replace(name, "-", "_"))}=${value}\""],
    )
    "toad-gateway.container" = ["Environment=\"TOAD_HOST=${coalesce(var.page_host, "none")}\""]
  }

  declarations = {
    for name, s in var.services : name => {
      version        = 1
      service        = name
      unit           = coalesce(s.unit, "${name}.container")
      repository     = s.repository
      image_limit    = s.image_limit
      readiness      = { for k, v in s.readiness : k => v if v != null }
      probation      = { for k, v in s.probation : k => v if v != null }
      fetch_deadline = s.fetch_deadline
      # Podman's time is below systemd's, and Toad waits for three of systemd's.
      stop_deadline = "${3 * (s.stop_seconds + 2)}s"
      barrier       = s.barrier
    }
  }

  templates = {
    for name, s in var.services : name => join("\n", concat(
      ["[Unit]", "Description=${coalesce(s.description, name)}"],
      lookup(s.extra, "Unit", []),
      ["", "[Container]", "ContainerName=${name}"],
      [for n in distinct(concat([s.readiness.network], s.networks)) : "Network=${n}.network"],
      ["StopTimeout=${s.stop_seconds}"],
      ["NoNewPrivileges=true", "ReadOnly=${s.read_only}", "DropCapability=all"],
      [for c in s.capabilities : "AddCapability=${c}"],
      [for p in s.publish : "PublishPort=${p}"],
      [for v in s.volumes : "Volume=${v}"],
      [for v in s.secrets : "Secret=${v}"],
      [for f in s.environment_files : "EnvironmentFile=${f}"],
      # Quadlet reads the quotes and backslashes, systemd the % and $ of what Quadlet makes of it.
      [for k, v in s.environment : "Environment=\"${k}=${replace(replace(replace(replace(v, "\\", "\\\\"), "\"", "\\\""), "%", "%%"), "$", "$$")}\""],
      lookup(s.extra, "Container", []),
      ["", "[Service]", "Restart=always", "TimeoutStopSec=${s.stop_seconds + 2}"],
      lookup(s.extra, "Service", []),
      s.start_at_boot || length(lookup(s.extra, "Install", [])) > 0 ? ["", "[Install]"] : [],
      s.start_at_boot ? ["WantedBy=default.target"] : [],
      lookup(s.extra, "Install", []),
      [""],
    ))
  }

  files = merge(
    { for f in local.own : "${local.infra}/toad/${f}" => file("${path.module}/../${f}") },
    {
      for f in local.own : "${local.infra}/toad/${f}.d/host.conf" => join("\n", concat(
        ["# What this host adds to ${f}.", "", "[Container]", "Image=${var.image}", "Pull=missing"],
        lookup(local.additions, f, []), [""],
      )) if endswith(f, ".container")
    },
    {
      for name, n in var.networks : "${local.infra}/${name}/${name}.network" => join("\n", concat(
        ["[Network]", "NetworkName=${name}"], n.options, [""],
      ))
    },
    { for name, d in local.declarations : "${local.enrollment}/${name}.json" => "${jsonencode(d)}\n" },
    { for name, d in local.declarations : "${local.enrollment}/${d.unit}" => local.templates[name] },
  )
}

resource "local_file" "this" {
  for_each             = local.files
  filename             = each.key
  content              = each.value
  file_permission      = "0644"
  directory_permission = "0755"
}

output "enrollment" {
  description = "The enrollment directory, for `toad check`."
  value       = local.enrollment
}

output "quadlets" {
  description = "The Quadlet directory, for `toad check --quadlets`."
  value       = local.quadlets
}
